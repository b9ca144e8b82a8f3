"""The encodings of GGUF tensors: blocks of consecutive weights of a row, and the bytes of a block. No torch."""

from typing import Final, NamedTuple

# Encodings that are known by name and not served.
_OTHER_NAMES: Final = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


class Encoding(NamedTuple):
    """values: weights of one block. num_bytes: of one block."""

    name: str
    values: int
    num_bytes: int


ENCODINGS: Final = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    20: Encoding("IQ4_NL", 32, 18),
    23: Encoding("IQ4_XS", 256, 136),
    30: Encoding("BF16", 1, 2),
    39: Encoding("MXFP4", 32, 17),
}


def encoding_name(number: int) -> str:
    """The name of an encoding that ENCODINGS does not have, for error messages."""
    return _OTHER_NAMES.get(number, f"number {number}")
