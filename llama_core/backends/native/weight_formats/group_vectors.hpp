// Grouped weights by activations in groups of 8-bit integers, on AVX-512 VNNI or on plain vectors.
#pragma once

#include "group_avx2.hpp"

#if !defined(LLAMA_GROUP_AVX2)

namespace llama {
namespace kernels {

// Lane o of the result: acc + the products of four codes of output o and four of x. codes: unsigned bytes.
inline IVec add_fours(IVec acc, UVec codes, const int8_t* x) {
#if defined(__AVX512VNNI__)
    int32_t four;
    std::memcpy(&four, x, 4);
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; i++) acc += (IVec)(codes >> (8 * i) & 255u) * int32_t(x[i]);
    return acc;
#endif
}

// N rows by S output tiles.
template <class F, int N, int S, bool Ask>
inline void group_products(const PackedWeights& w, const GroupRows& x, int tile, int distance, float* out) {
    using Step = GroupStep<F>;
    const Streams<S> weights(w, tile, distance);
    Vec acc[S][N][kRegisterTiles] = {};
    for (size_t g = 0, at = 0; g < w.padded() / kGroupInputs; g++, at += Step::kBytes) UNROLL for (int s = 0; s < S; s++) {
            const char* step = weights[s] + at;
            if (Ask)
                for (size_t line = 0; line < Step::kLines; line++) prefetch(step + line * 64);
            IVec dots[N][kRegisterTiles] = {};
    UNROLL for (int four = 0; four < kFours; four++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                const UVec codes = F::Codes::four(Step::codes(step, t), four);
                UNROLL for (int r = 0; r < N; r++) dots[r][t] = add_fours(dots[r][t], codes, x.group(r, g) + four * 4);
            }
            UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) acc[s][r][t] = add_group<F>(acc[s][r][t], dots[r][t] - F::Codes::kBias * x.sum(r, g), step, t, x.scale(r, g));
        }
    store_sums(acc, out);
}

template <class F>
inline void multiply_groups(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                            float* out) {
    by_rows<kIntRows>(rows, first, [&](auto n, auto ask, int r) {
        group_products<F, n, 1, ask>(w, GroupRows(x.groups, row + r), tile, 0, out + r * kTileOutputs);
    });
}

// Rows by streams whose sums fit in the registers beside those of a group.
#if defined(__AVX512F__)
constexpr int kGroupStreamSums = 8;
#else
constexpr int kGroupStreamSums = 2;
#endif

template <class F>
inline void multiply_group_streams(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, int distance,
                                   float* out) {
    by_streams<kGroupStreamSums>(rows, [&](auto n, auto streams, int s) {
        group_products<F, n, streams, true>(w, GroupRows(x.groups, row), tile + s * distance, distance,
                                            out + s * n * kTileOutputs);
    });
}

}  // namespace kernels
}  // namespace llama
#endif
