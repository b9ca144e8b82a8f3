"""How much shared memory a multiprocessor of the current GPU has: tiles depend on it."""

from functools import cache
from typing import Final

from triton.runtime import driver

_MUCH: Final = 224 * 1024  # bytes of one program at most, on sm_90 and sm_100


@cache
def has_much_shared_memory() -> bool:
    """Whether a multiprocessor has 228 KB (sm_90, sm_100), not 164 KB (sm_80) or 100 KB (sm_86, sm_89, sm_120)."""
    try:
        device = driver.active.get_current_device()
        properties = driver.active.utils.get_device_properties(device)
    except RuntimeError:  # Triton's interpreter has no device
        return True
    return bool(properties["max_shared_mem"] >= _MUCH)
