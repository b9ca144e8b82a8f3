"""Sizes and lengths as people write them: 4096, 8k, 1.5G, 4GiB. One parser for arguments, options and the environment."""

import re
from decimal import Decimal
from typing import Final

UNITS: Final = {
    **{"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40},
}
EXAMPLES: Final = "such as 4096, 8k (8,000), 4Ki (4,096), 512MB or 4GiB"
_SIZE: Final = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """The number that `text` means: k, M, G and T are powers of 1,000, Ki, Mi, Gi and Ti of 1,024; a B at the end says nothing.

    Raises ValueError, which does not repeat the text.
    """
    match = _SIZE.fullmatch(text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"must be a whole number {EXAMPLES}")
    value = Decimal(match[1].replace("_", "")) * unit
    if value != int(value):
        raise ValueError(f"must be a whole number after its unit is applied, {EXAMPLES}")
    return int(value)


def format_bytes(num_bytes: float) -> str:
    """Such as "512 B", "1.2 MB" or "14.0 GB", in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.95 or unit == "TB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError
