"""Products of few rows in kernels of our own, which also do what a further kernel would do: they save a launch, and the traffic
of a result that no further kernel reads.

On an H100 their first tiles read weights in bfloat16 as fast as cuBLAS or faster: 1.1 times for gate and up of Llama 2 7B, 1.07
for down (docs/performance.md, "On a GPU"). A step's time is estimated as if both read alike.
"""

from typing import Final

# Rows of a product that reading the weights limits on every GPU in `devices`. More rows go to the library.
MOST_ROWS: Final = 64


def swiglu_bytes(rows: int, hidden: int, itemsize: int) -> int:
    """That gate and up take between their product and SwiGLU: written once, read once."""
    return 2 * rows * 2 * hidden * itemsize
