// Vectors of 16 float lanes and the few functions on them that a Transformer needs; the same code for every CPU.
//
// A vector is one register of AVX-512, two of AVX2 or four of SSE (split.hpp). The result of a lane depends neither on
// the width of the hardware's registers nor on the number of rows that are computed together.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif

// Goes before a loop with a compile-time count, and keeps the loop's variables in registers.
#define UNROLL _Pragma("GCC unroll 16")

#include "split.hpp"

namespace llama {

typedef VecOf<float> Vec;
typedef VecOf<int32_t> IVec;
typedef VecOf<uint32_t> UVec;
typedef VecOf<uint16_t> Halves;  // 32 lanes of 16 bits
typedef VecOf<int16_t> Shorts;

constexpr int kLanes = 16;

struct bf16 {
    uint16_t bits;
};

inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec v) { store_as(p, v); }
inline Vec splat(float x) { return splat_as<Vec>(x); }
inline Vec to_float(IVec v) { return convert<Vec>(v); }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;  // contracted to one rounding where the target has it (-ffp-contract=fast)
#endif
}

// Not left to the compiler, which contracts a product and a sum only where both are in one basic block.
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// Stores the lowest 8 or 16 bits of each lane.
inline void store_low(int8_t* p, IVec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
    store_narrow(p, v);
#endif
}
inline void store_low(int16_t* p, IVec v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
#else
    store_narrow(p, v);
#endif
}

inline float sum(Vec v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}
inline float max(Vec v) {
    return fold(v, [](auto a, auto b) { return select(a > b, a, b); });
}

// Whether any lane of a comparison is true.
inline bool any(IVec v) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)v);
#else
    return fold(v, [](auto a, auto b) { return a | b; });
#endif
}

// bfloat16 is the upper half of a float, rounded to nearest even.

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(bits >> 16 | 0x40)};  // NaN stays NaN
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline Vec load(const bf16* p) {
#if defined(__AVX512F__)  // GCC converts a vector in two halves
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#else
    return (Vec)(load_wide<UVec>(p) << 16);
#endif
}

inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &half, sizeof half);
#else
    UVec bits = (UVec)v;
    UVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    UVec nan = bits >> 16 | 0x40;
    store_narrow(&p->bits, select((bits & 0x7fffffff) > 0x7f800000, nan, rounded));
#endif
}

inline float widen(float x) { return x; }
template <class T>
inline T narrow_to(float x);
template <>
inline float narrow_to<float>(float x) {
    return x;
}
template <>
inline bf16 narrow_to<bf16>(float x) {
    return narrow(x);
}

// Rounds floats to T and back: the reference holds every intermediate result in the model's type.
template <class T>
inline Vec round_to(Vec v);
template <>
inline Vec round_to<float>(Vec v) {
    return v;
}
template <>
inline Vec round_to<bf16>(Vec v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    UVec bits = (UVec)v;
    UVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return (Vec)select((bits & 0x7fffffff) > 0x7f800000, bits, rounded);
#endif
}

// Products along the summed dimension. Lane i of `weights` holds the next weight (float) or the next two weights (bfloat16) of
// output i; `x` holds as many activations: the same for all lanes (`broadcast`), or the next ones for each (`load_next`).
// Products of bfloat16 are exact in float, and `add` adds the two in order.

template <class T>
struct Dot;

template <>
struct Dot<float> {
    static constexpr int kStep = 1;
    static Vec broadcast(const float* x) { return splat(*x); }
    static Vec load_next(const float* x) { return load(x); }
    static Vec add(Vec acc, const float* weights, Vec x) { return fma(load(weights), x, acc); }
};

template <>
struct Dot<bf16> {
    static constexpr int kStep = 2;
#if defined(__AVX512BF16__)
    static __m512bh broadcast(const bf16* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static __m512bh load_next(const bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
    static Vec add(Vec acc, const bf16* weights, __m512bh x) {
        return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(weights), x);
    }
#else
    struct Pair {
        Vec even, odd;
    };
    static Pair broadcast(const bf16* x) { return {splat(widen(x[0])), splat(widen(x[1]))}; }
    static Pair load_next(const bf16* x) {
        UVec both = load_as<UVec>(x);
        return {(Vec)(both << 16), (Vec)(both & 0xffff0000)};
    }
    static Vec add(Vec acc, const bf16* weights, const Pair& x) {
        UVec both = load_as<UVec>(weights);
        return fma((Vec)(both & 0xffff0000), x.odd, fma((Vec)(both << 16), x.even, acc));
    }
#endif
};

// e^x to 2 ulp: e^x = 2^n * e^r with |r| <= ln(2) / 2, e^r by its Taylor series to degree 7. exp(0) is exactly 1, exp(-inf)
// exactly 0, exp(NaN) NaN; no result is larger than e^88.
inline Vec exp(Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec low = splat(-87.0f);
#if defined(__AVX512F__)
    // These instructions return the second operand if one operand is NaN.
    Vec inside = (Vec)_mm512_max_ps((__m512)low, _mm512_min_ps((__m512)splat(88.0f), (__m512)x));
#else
    const Vec high = splat(88.0f);
    Vec inside = select(x > low, select(x < high, x, high), low);
#endif
    Vec shifted = fma(inside, splat(1.44269504f), magic);
    Vec n = shifted - magic;
    Vec r = fma(n, splat(-0.693359375f), inside);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLE_UQ);  // true for NaN
    return (Vec)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
    IVec exponent = ((IVec)shifted - (IVec)magic + 127) << 23;
    Vec result = select(x > low, p * (Vec)exponent, Vec{});
    return select(x == x, result, x);  // NaN stays NaN
#endif
}

// 2^x to 3 ulp for x <= 0, 2^-126 for less; exp2(0) is exactly 1, exp2(NaN) NaN. The minimax polynomial of 2^r for |r| <= 1/2.
inline Vec exp2(Vec x) {
    const Vec magic = splat(12582912.0f), low = splat(-126.0f);
#if defined(__AVX512F__)
    Vec inside = (Vec)_mm512_max_ps((__m512)low, (__m512)x);  // x if x is NaN
#else
    Vec inside = select(x < low, low, x);
#endif
    Vec shifted = inside + magic;
    Vec n = shifted - magic, r = inside - n;
    Vec p = splat(1.326472731e-3f);
    p = fma(p, r, splat(9.671512991e-3f));
    p = fma(p, r, splat(5.550733581e-2f));
    p = fma(p, r, splat(2.402224243e-1f));
    p = fma(p, r, splat(6.931470037e-1f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (Vec)(((IVec)shifted - (IVec)magic + 127) << 23);
#endif
}

// 1 / x to 2 ulp, for positive finite x.
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
    Vec r = (Vec)_mm512_rcp14_ps((__m512)x);  // two Newton steps take half the time of a division
    r = fma(fma(-x, r, splat(1.0f)), r, r);
    return fma(fma(-x, r, splat(1.0f)), r, r);
#else
    return splat(1.0f) / x;
#endif
}

}  // namespace llama
