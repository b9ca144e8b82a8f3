"""The backend for GPUs: fused projections, kernels of our own in Triton, and whole decode steps as CUDA graphs.

`backend.py` runs steps and captures graphs, `model.py` is this rank's share of the Transformer, `ops.py` defines the kernels'
results in torch, `kernels.py` computes them in Triton, and `sampling_head.py` samples. docs/architecture.md describes the
modules.
"""
