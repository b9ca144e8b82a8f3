"""float8_e4m3fn in Triton as bytes, because GPUs before sm_89 have no such type.

Four bits of exponent with a bias of 7, three of mantissa, no infinities, largest value 448 (Micikevicius et al. 2022).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)
_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def from_float8(byte):
    """float32 values of bytes.

    float16 has the same order of fields and a bias of 15 instead of 7: shifted, each value is 2^8 too small, also a subnormal.
    """
    wide = byte.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def to_float8(x):
    """Bytes of the nearest values, ties to even; what is larger than the largest becomes the largest."""
    wide = x.to(tl.float32)
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(wide), _LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # The upper 12 bits are exponent and mantissa, with a bias of 127 instead of 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # A sum with 2^14 has units of 2^-9, the least subnormal; its bits count them.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < _LEAST_NORMAL, subnormal, normal) | sign).to(tl.uint8)
