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
        return fma(__builtin_convertvector(code, Vec), scales, GroupStep<F>::minima(step, t));
    else
        return __builtin_convertvector(code - F::kOffset, Vec) * scales;
}

// Few rows: sums in registers.
template <class F, int N, bool Ask>
inline void expanded_products(const PackedWeights& w, const float* x, size_t stride, int tile, float* out) {
    using Step = GroupStep<F>;
    const char* step = w.output_tile(tile);
    Vec acc[N][kRegisterTiles] = {};
    for (size_t g = 0; g < w.padded() / kGroupInputs; g++, step += Step::kBytes) {
        if (Ask)
            for (size_t line = 0; line < Step::kLines; line++) prefetch(step + line * 64);
    UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const Vec scales = Step::scales(step, t);
            for (int k = 0; k < kGroupInputs; k++) {
                const Vec column = expanded<F>(step, t, k, scales);
                UNROLL for (int r = 0; r < N; r++) acc[r][t] = fma(column, splat(x[r * stride + g * kGroupInputs + k]), acc[r][t]);
            }
        }
    }
    UNROLL for (int r = 0; r < N; r++)
        UNROLL for (int t = 0; t < kRegisterTiles; t++) store(out + r * kTileOutputs + t * kLanes, acc[r][t]);
}

template <class F>
inline void multiply_expanded(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, bool first,
                              float* out) {
    by_rows<kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
        expanded_products<F, n, ask>(w, x[row + r], x.rows.stride, tile, out + r * kTileOutputs);
    });
}

}  // namespace kernels
}  // namespace llama
