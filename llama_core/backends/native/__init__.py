"""The Transformer in C++ for CPU ranks: packed weights, attention that reads the paged cache in place, a step in one call.

`build.py` compiles it once for this machine, `library.py` loads it, and `backend.py` has the backend for `backends/runner.py`.
On a machine that cannot build it, torch computes the same (`backends/fused/ops.py`).
"""
