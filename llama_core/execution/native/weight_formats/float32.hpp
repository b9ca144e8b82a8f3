// float32 weights for float32 activations: [output tile][k][32 outputs].
#pragma once

#include "../linear.hpp"

namespace llama {

struct Float32Weights {
    using Activation = float;
    static constexpr char kName[] = "float32";
    static constexpr WeightLayout kLayout{.step_inputs = 1, .step_bytes = kTileOutputs * 4, .bytes_per_output = 0};
    static constexpr size_t kSumBytes = 4;
    static constexpr InputForm kInputForm = InputForm::kDense;
    static constexpr int kMaxInputs = INT_MAX;
    static constexpr std::nullptr_t pack_groups = nullptr;

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        float* out = reinterpret_cast<float*>(w.output_tile(output / kTileOutputs)) + output % kTileOutputs;
        for (int k = 0; k < w.inputs(); k++) out[size_t(k) * kTileOutputs] = widen(source[k]);
    }

    static void multiply(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, bool first,
                         float* out) {
        kernels::by_rows<kernels::kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
            products<n, ask>(x[row + r], x.rows.stride, w.output_tile(tile), w.inputs(), out + r * kTileOutputs);
        });
    }

#if defined(LLAMA_AMX)
    // Tile registers multiply no float32.
    static constexpr size_t kExpandedStepBytes = 0;
    static constexpr std::nullptr_t add_k_slice = nullptr, finish = nullptr, expand = nullptr;
#endif

  private:
    template <int N, bool Ask>
    static void products(const float* x, size_t stride, const char* weights, size_t inputs, float* out) {
        Vec acc[N][kRegisterTiles] = {};
        for (size_t k = 0; k < inputs; k++, weights += kTileOutputs * 4) {
            if (Ask) UNROLL for (int t = 0; t < kRegisterTiles; t++) kernels::prefetch(weights + t * 64);
            Vec column[kRegisterTiles];
            UNROLL for (int t = 0; t < kRegisterTiles; t++) column[t] = load_as<Vec>(weights + t * 64);
            UNROLL for (int r = 0; r < N; r++) {
                Vec value = splat(x[r * stride + k]);
                UNROLL for (int t = 0; t < kRegisterTiles; t++) acc[r][t] = fma(column[t], value, acc[r][t]);
            }
        }
        UNROLL for (int r = 0; r < N; r++)
            UNROLL for (int t = 0; t < kRegisterTiles; t++) store(out + r * kTileOutputs + t * kLanes, acc[r][t]);
    }
};

}  // namespace llama
