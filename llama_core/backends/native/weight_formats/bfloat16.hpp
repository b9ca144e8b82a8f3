// bfloat16 weights for bfloat16 activations: [output tile][k / 32][2 register tiles][16 pairs of k][16 outputs][2].
#pragma once

#include "../layers/linear.hpp"

namespace llama {

struct BFloat16Weights {
    using Activation = bf16;
    static constexpr char kName[] = "bfloat16";
    static constexpr WeightLayout kLayout{.step_inputs = 32, .step_bytes = kRegisterTiles * kRegisterTileBytes};
    static constexpr size_t kSliceInputs = 256;
    static constexpr InputForm kInputForm = InputForm::kDense;
    static constexpr int kMaxInputs = INT_MAX, kGroup = kGroupInputs;
    static constexpr std::nullptr_t pack_groups = nullptr;

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        char* base = w.output_tile(output / kTileOutputs);
        const int place = output % kTileOutputs, half = place / 16, lane = place % 16;
        for (int k = 0; k < w.inputs(); k++) {
            bf16* line =
                reinterpret_cast<bf16*>(base + (k / 32 * kRegisterTiles + half) * kRegisterTileBytes + k % 32 / 2 * 64);
            line[lane * 2 + k % 2] = narrow(widen(source[k]));
        }
    }

    static void multiply(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                         float* out) {
#if defined(LLAMA_AMX)
        if (first)
            add_products<true>(w, x, row, rows, tile, 0, w.padded(), out);
        else
            add_products<false>(w, x, row, rows, tile, 0, w.padded(), out);
#else
        kernels::by_rows<kernels::kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
            products<n, 1, ask>(w, x[row + r], x.rows.stride, tile, 0, out + r * kTileOutputs);
        });
#endif
    }

    static void multiply_streams(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, int distance,
                                 float* out) {
#if defined(LLAMA_AMX)
        for (int s = 0; s < kStreams; s += 2)
            multiply_two_streams(w, x[row], x.rows.stride, rows, tile + s * distance, distance, out + s * rows * kTileOutputs);
#else
        kernels::by_streams<kernels::kFloatRows>(rows, [&](auto n, auto streams, int s) {
            products<n, streams, true>(w, x[row], x.rows.stride, tile + s * distance, distance, out + s * n * kTileOutputs);
        });
#endif
    }

#if defined(LLAMA_AMX)
    static constexpr std::nullptr_t expand = nullptr;

    static void add_k_slice(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, size_t from,
                            size_t to, const char*, void* sums) {
        add_products<false>(w, x, row, rows, tile, from, to, static_cast<float*>(sums));
    }

    static const float* finish(const PackedWeights&, const Inputs<bf16>&, size_t, int, int, const void* sums, float*) {
        return static_cast<const float*>(sums);
    }
#endif

  private:
    // N rows by S output tiles.
    template <int N, int S, bool Ask>
    static void products(const PackedWeights& w, const bf16* x, size_t stride, int tile, int distance, float* out) {
        const kernels::Streams<S> weights(w, tile, distance);
        Vec acc[S][N][kRegisterTiles] = {};
        for (size_t k = 0, at = 0; k < w.padded(); k += 32, at += kLayout.step_bytes)
            for (int pair = 0; pair < 16; pair++) UNROLL for (int s = 0; s < S; s++) {
                    const char* line = weights[s] + at + pair * 64;
                    if (Ask) UNROLL for (int t = 0; t < kRegisterTiles; t++) kernels::prefetch(line + t * kRegisterTileBytes);
                    UNROLL for (int r = 0; r < N; r++) {
                        auto value = Dot<bf16>::broadcast(x + r * stride + k + pair * 2);
                        UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                            auto column = reinterpret_cast<const bf16*>(line + t * kRegisterTileBytes);
                            acc[s][r][t] = Dot<bf16>::add(acc[s][r][t], column, value);
                        }
                    }
                }
        kernels::store_sums(acc, out);
    }

#if defined(LLAMA_AMX)
    // Few rows by two output tiles: out [2][rows][kTileOutputs]. Computes a whole register tile of x, as multiply_16 does.
    static void multiply_two_streams(const PackedWeights& w, const bf16* x, size_t stride, int rows, int tile, int distance,
                                     float* out) {
        const kernels::Streams<2> weights(w, tile, distance);
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (size_t k = 0, at = 0; k < w.padded(); k += 32, at += kLayout.step_bytes) {
            const char *first = weights[0] + at, *second = weights[1] + at;
            for (size_t line = 0; line < kLayout.step_bytes; line += 64) {
                kernels::fetch(first + line);
                kernels::fetch(second + line);
            }
            _tile_loadd(4, x + k, stride * 2);
            _tile_loadd(6, first, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, first + kRegisterTileBytes, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, second, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, second + kRegisterTileBytes, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        alignas(64) float products[2][16][kTileOutputs];
        _tile_stored(0, products[0], kernels::kOutBytes); _tile_stored(1, products[0][0] + 16, kernels::kOutBytes);
        _tile_stored(2, products[1], kernels::kOutBytes); _tile_stored(3, products[1][0] + 16, kernels::kOutBytes);
        for (int s = 0; s < 2; s++) std::memcpy(out + s * rows * kTileOutputs, products[s], rows * kernels::kOutBytes);
    }

    // Adds to `sums` [kMaxRows][kTileOutputs]; from = 0 begins new sums. Computes whole register tiles: rows beyond `rows` are
    // products of the memory after x, and nothing reads them.
    template <bool Ask>
    static void add_products(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, size_t from, size_t to,
                             float* sums) {
        const char* weights = w.output_tile(tile) + from * kTileOutputs * sizeof(bf16);
        (rows > 16 ? multiply_32<Ask> : multiply_16<Ask>)(x[row] + from, x.rows.stride, weights, to - from, sums, from == 0);
    }

    // 16 rows: one register tile of x by the output tile's two.
    template <bool Ask>
    static void multiply_16(const bf16* x, size_t stride, const char* weights, size_t padded, float* out, bool first_slice) {
        using kernels::kOutBytes;
        if (first_slice) {
            _tile_zero(0); _tile_zero(1);
        } else {
            _tile_loadd(0, out, kOutBytes); _tile_loadd(1, out + 16, kOutBytes);
        }
        for (size_t step = 0; step < padded / 32; step++, weights += kRegisterTiles * kRegisterTileBytes) {
            if (Ask)
                for (size_t line = 0; line < kLayout.step_bytes; line += 64) kernels::fetch(weights + line);
            _tile_loadd(4, x + step * 32, stride * 2);
            _tile_loadd(6, weights, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + kRegisterTileBytes, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, out, kOutBytes); _tile_stored(1, out + 16, kOutBytes);
    }

    // 32 rows: two register tiles of x by the output tile's two.
    template <bool Ask>
    static void multiply_32(const bf16* x, size_t stride, const char* weights, size_t padded, float* out, bool first_slice) {
        using kernels::kOutBytes, kernels::prefetch_quarter;
        float* lower = out + 16 * kTileOutputs;
        if (first_slice) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        } else {
            _tile_loadd(0, out, kOutBytes); _tile_loadd(1, out + 16, kOutBytes);
            _tile_loadd(2, lower, kOutBytes); _tile_loadd(3, lower + 16, kOutBytes);
        }
        for (size_t step = 0; step < padded / 32; step++, weights += kRegisterTiles * kRegisterTileBytes) {
            _tile_loadd(4, x + step * 32, stride * 2);
            prefetch_quarter<Ask>(weights, 0);
            _tile_loadd(6, weights, 64);
            prefetch_quarter<Ask>(weights, 1);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, x + 16 * stride + step * 32, stride * 2);
            prefetch_quarter<Ask>(weights, 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(7, weights + kRegisterTileBytes, 64);
            prefetch_quarter<Ask>(weights, 3);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, kOutBytes); _tile_stored(1, out + 16, kOutBytes);
        _tile_stored(2, lower, kOutBytes); _tile_stored(3, lower + 16, kOutBytes);
    }
#endif
};

}  // namespace llama
