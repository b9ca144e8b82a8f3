"""What a model is: its sizes, its layers as lists of operations over declared weights, and the part of each rank. No torch."""
