// Grouped weights by float32 activations: the weights are expanded in registers.
#pragma once

#include "group_codes.hpp"

namespace llama {
namespace kernels {

// The weights of 16 outputs for input k of a step.
template <class F>
inline Vec expanded(const char* step, int t, int k, Vec scales) {
    const IVec code = F::Codes::code(GroupStep<F>::codes(step, t), k);
    if constexpr (F::kMinima)
        return fma(to_float(code), scales, GroupStep<F>::minima(step, t));
    else
        return to_float(code - F::kOffset) * scales;
}

// Few rows: sums in registers.
template <class F, int N, int S, bool Ask>
inline void expanded_products(const PackedWeights& w, const float* x, size_t stride, int tile, int distance, float* out) {
    using Step = GroupStep<F>;
    const Streams<S> weights(w, tile, distance);
    Vec acc[S][N][kRegisterTiles] = {};
    for (size_t g = 0, at = 0; g < w.padded() / kGroupInputs; g++, at += Step::kBytes) UNROLL for (int s = 0; s < S; s++) {
            const char* step = weights[s] + at;
            if (Ask)
                for (size_t line = 0; line < Step::kLines; line++) prefetch(step + line * 64);
    UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                const Vec scales = Step::scales(step, t);
                for (int k = 0; k < kGroupInputs; k++) {
                    const Vec column = expanded<F>(step, t, k, scales);
                    const float* inputs = x + g * kGroupInputs + k;
                    UNROLL for (int r = 0; r < N; r++) acc[s][r][t] = fma(column, splat(inputs[r * stride]), acc[s][r][t]);
                }
            }
        }
    store_sums(acc, out);
}

template <class F>
inline void multiply_expanded(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, bool first,
                              float* out) {
    by_rows<kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
        expanded_products<F, n, 1, ask>(w, x[row + r], x.rows.stride, tile, 0, out + r * kTileOutputs);
    });
}

template <class F>
inline void multiply_expanded_streams(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile,
                                      int distance, float* out) {
    by_streams<kFloatRows>(rows, [&](auto n, auto streams, int s) {
        expanded_products<F, n, streams, true>(w, x[row], x.rows.stride, tile + s * distance, distance, out + s * n * kTileOutputs);
    });
}

}  // namespace kernels
}  // namespace llama
