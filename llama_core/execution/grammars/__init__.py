"""Grammars of answers on rank 0: which tokens they allow next, computed beside the forward pass (`masks.py`)."""
