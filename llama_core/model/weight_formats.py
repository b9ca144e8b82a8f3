"""The weight formats and the codings in which checkpoints store weights. Loads no tensors."""

from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple, get_args

# Of the argument `quantization`. "auto": as the checkpoint stores each matrix. "none": every matrix in the model's dtype.
Quantization = Literal["auto", "none", "int8", "int8_groups", "int4", "int4_min", "fp8"]
QUANTIZATIONS: Final[tuple[str, ...]] = get_args(Quantization)
QUANTIZED: Final = QUANTIZATIONS[2:]  # `matrices.py` has a line for each

_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of E2M1


class Coding(NamedTuple):
    """A weight is scale * number + minimum, where number is code - middle, or the table's entry for the code.

    bits: of a code. group: inputs that share a scale, and a minimum if has_minima. is_short: the scales of 256 inputs are small
    whole numbers of one, as in k-quants.
    """

    bits: int
    group: int = 32
    middle: int = 0
    has_minima: bool = False
    is_short: bool = False
    table: tuple[int, ...] = ()

    @property
    def native_bytes(self) -> float:
        """Of a weight in the native engine with activations in bfloat16, see `block_codings.hpp`."""
        of_group = (
            0 if self.bits == 8 else (16 if self.has_minima else 8) if self.is_short else 16 + 16 * self.has_minima
        )
        return (self.bits + of_group / self.group + (48 if self.is_short else 32) / 256) / 8


# A line more is a coding more, which needs one in `native/weight_formats/codings.hpp` too.
CODINGS: Final[Mapping[str, Coding]] = {
    "int8_groups": Coding(8),
    "int4": Coding(4, middle=8),
    "int4_min": Coding(4, has_minima=True),
    "int4_128": Coding(4, 128, middle=8),
    "int4_zero_128": Coding(4, 128, has_minima=True),
    "q4_k": Coding(4, has_minima=True, is_short=True),
    "q5_k": Coding(5, has_minima=True, is_short=True),
    "q6_k": Coding(6, 16, middle=32, is_short=True),
    "q5_0": Coding(5, middle=16),
    "q5_1": Coding(5, has_minima=True),
    "iq4_nl": Coding(4, table=_IQ4),
    "iq4_xs": Coding(4, is_short=True, table=_IQ4),
    "mxfp4": Coding(4, table=_FP4),
}
# The codings that torch and Triton multiply, and the native engine with activations in float32. Their scales are float16.
PORTABLE: Final = ("int8_groups", "int4", "int4_min")
# Ends the name of a stored coding whose scales float16 does not hold.
WIDE: Final = " with float32 scales"


def held_as(stored: str, codings: Collection[str]) -> tuple[str, ...]:
    """Those of `codings` that hold a weight without loss that a checkpoint stores as `stored`, the smallest first."""
    if stored.endswith(WIDE) and "int4_128" not in codings:
        return ()
    stored = stored.removesuffix(WIDE)
    has_zeros = "int4_zero_128" in codings  # else minima are float16, which does not hold each zero * scale
    wider = {
        "int4": ("int4", "int4_min"),
        "int4_128": ("int4_128", "int4", "int4_min"),
        "int4_zero": ("int4_min",) if has_zeros else ("int8_groups",),
        "int4_zero_128": ("int4_zero_128", "int4_min") if has_zeros else ("int8_groups",),
    }
    return tuple(name for name in wider.get(stored, (stored,)) if name in codings)
