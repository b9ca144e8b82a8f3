// float16: the type of the scales and minima of grouped weights.
#pragma once

#include "simd.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace llama {

struct half {
    uint16_t bits;
};

// Rounds to nearest even; infinity beyond 65504.
inline half to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    // A product with 2^-112 moves the exponent of a float16 to that of a float, and rounds where float16 has fewer digits.
    float magnitude = std::fabs(x) * 0x1p-112f;
    std::memcpy(&bits, &magnitude, 4);
    const uint32_t rounded = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    return {uint16_t(sign | (rounded < 0x7c00 ? rounded : 0x7c00))};
}

inline float widen(half x) {
    const uint32_t bits = uint32_t(x.bits & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude *= 0x1p112f;
    return x.bits & 0x8000 ? -magnitude : magnitude;
}

// 16 values. Those that are not finite are not kept so: no weight has them.
inline Vec load(const half* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256 both[] = {_mm256_cvtph_ps(load_as<__m128i>(p)), _mm256_cvtph_ps(load_as<__m128i>(p + 8))};
    return load_as<Vec>(both);
#else
    UVec bits = load_wide<UVec>(p);
    Vec magnitude = (Vec)((bits & 0x7fff) << 13) * splat(0x1p112f);
    return (Vec)((UVec)magnitude | (bits & 0x8000) << 16);
#endif
}

}  // namespace llama
