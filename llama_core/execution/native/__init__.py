"""The Transformer in C++ for CPU ranks: packed weights, attention that reads the paged cache in place, a step in one call.

`build.py` compiles it once for this machine; `backend.py` is what `execution/runner.py` uses. Where it cannot be built, torch
computes the same (`execution/reference/backend.py`).
"""
