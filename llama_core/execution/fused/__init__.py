"""The fast way on a GPU: fused projections, kernels of our own in Triton, and whole decode steps as CUDA graphs.

`backend.py` runs steps and captures graphs, `model.py` is this rank's share of the Transformer, `ops.py` says what the
kernels compute, in torch, and `kernels.py` computes it in Triton.
"""
