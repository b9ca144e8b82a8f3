// float32 weights for float32 activations: [output tile][k][32 outputs].
#pragma once

#include "../layers/linear.hpp"

namespace llama {

struct Float32Weights {
    using Activation = float;
    static constexpr char kName[] = "float32";
    static constexpr WeightLayout kLayout{.step_inputs = 1, .step_bytes = kTileOutputs * 4};
    static constexpr size_t kSliceInputs = 256;
    static constexpr InputForm kInputForm = InputForm::kDense;
    static constexpr int kMaxInputs = INT_MAX, kGroup = kGroupInputs;
    static constexpr std::nullptr_t pack_groups = nullptr;

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        float* out = reinterpret_cast<float*>(w.output_tile(output / kTileOutputs)) + output % kTileOutputs;
        for (int k = 0; k < w.inputs(); k++) out[size_t(k) * kTileOutputs] = widen(source[k]);
    }

    static void multiply(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, bool first,
                         float* out) {
        kernels::by_rows<kernels::kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
            products<n, 1, ask>(w, x[row + r], x.rows.stride, tile, 0, out + r * kTileOutputs);
        });
    }

    static void multiply_streams(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, int distance,
                                 float* out) {
        kernels::by_streams<kernels::kFloatRows>(rows, [&](auto n, auto streams, int s) {
            products<n, streams, true>(w, x[row], x.rows.stride, tile + s * distance, distance, out + s * n * kTileOutputs);
        });
    }

#if defined(LLAMA_AMX)
    // Tile registers multiply no float32.
    static constexpr std::nullptr_t add_k_slice = nullptr, finish = nullptr, expand = nullptr;
#endif

  private:
    // N rows by S output tiles.
    template <int N, int S, bool Ask>
    static void products(const PackedWeights& w, const float* x, size_t stride, int tile, int distance, float* out) {
        const kernels::Streams<S> weights(w, tile, distance);
        Vec acc[S][N][kRegisterTiles] = {};
        for (size_t k = 0, at = 0; k < size_t(w.inputs()); k++, at += kTileOutputs * 4) UNROLL for (int s = 0; s < S; s++) {
                if (Ask) UNROLL for (int t = 0; t < kRegisterTiles; t++) kernels::prefetch(weights[s] + at + t * 64);
                Vec column[kRegisterTiles];
                UNROLL for (int t = 0; t < kRegisterTiles; t++) column[t] = load_as<Vec>(weights[s] + at + t * 64);
                UNROLL for (int r = 0; r < N; r++) {
                    const Vec value = splat(x[r * stride + k]);
                    UNROLL for (int t = 0; t < kRegisterTiles; t++) acc[s][r][t] = fma(column[t], value, acc[s][r][t]);
                }
            }
        kernels::store_sums(acc, out);
    }
};

}  // namespace llama
