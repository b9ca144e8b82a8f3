// int8 weights with one scale for each output: [output tile][k / 64][2 register tiles][16 fours of k][16 outputs][4].
//
// Activations are multiplied as 16-bit integers in two bytes (quantized.hpp), so the sums are exact in any order. Beside the
// weights: float scales [outputs], then int32 sums of each output's weights [outputs].
#pragma once

#include "../linear.hpp"

namespace llama {

template <class T>
struct Int8Weights {
    using Activation = T;
    static constexpr char kName[] = "int8";
    static constexpr WeightLayout kLayout{
        .step_inputs = 64, .step_bytes = kRegisterTiles * kRegisterTileBytes, .bytes_per_output = 8};
    static constexpr size_t kSumBytes = 8;  // of the high and of the low bytes
    static constexpr InputForm kInputForm = InputForm::kRows;
    static constexpr int kMaxInputs = 66'000;  // products of so many bytes fit into 32 bits
    static constexpr std::nullptr_t pack_groups = nullptr;

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        char* base = w.output_tile(output / kTileOutputs);
        const int place = output % kTileOutputs, half = place / 16, lane = place % 16;
        float most = 0;
        for (int k = 0; k < w.inputs(); k++) most = std::max(most, std::fabs(widen(source[k])));
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        int32_t total = 0;
        for (int k = 0; k < w.inputs(); k++) {
            const int q = int(std::lrint(widen(source[k]) * inverse));
            int8_t* line =
                reinterpret_cast<int8_t*>(base + (k / 64 * kRegisterTiles + half) * kRegisterTileBytes + k % 64 / 4 * 64);
            line[lane * 4 + k % 4] = int8_t(q);
            total += q;
        }
        scales(w)[output] = most / 127.0f;
        weight_sums(w)[output] = total;
    }

    static void multiply(const PackedWeights& w, const Inputs<T>& inputs, size_t row, int rows, int tile, bool first,
                         float* out) {
        const Quantized& x = inputs.quantized;
#if defined(LLAMA_AMX)
        alignas(64) Sums sums[kMaxRows / 16];
        add_products(w, x, row, rows, tile, first, 0, w.padded(), sums);
        finish(w, inputs, row, rows, tile, sums, out);
#else
        kernels::by_rows<kernels::kIntRows>(
            rows, first, [&](auto n, auto ask, int r) { products<n, 1, ask>(w, x, row + r, tile, 0, out + r * kTileOutputs); });
#endif
    }

    static void multiply_streams(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, int distance,
                                 float* out) {
        kernels::by_streams<kernels::kIntRows>(rows, [&](auto n, auto streams, int s) {
            products<n, streams, true>(w, x.quantized, row, tile + s * distance, distance, out + s * n * kTileOutputs);
        });
    }

#if defined(LLAMA_AMX)
    static constexpr std::nullptr_t expand = nullptr;

    static void add_k_slice(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, size_t from, size_t to,
                            const char*, void* sums) {
        add_products(w, x.quantized, row, rows, tile, false, from, to, static_cast<Sums*>(sums));
    }

    static const float* finish(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, const void* sums,
                               float* out) {
        auto from = static_cast<const Sums*>(sums);
        for (int r = 0; r < rows; r += 16) {
            const Sums& of = from[r / 16];
            const float* scale = x.quantized.scale() + row + r;
            float* to = out + r * kTileOutputs;
            for (int i = 0; i < std::min(16, rows - r); i++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                    IVec high = load_as<IVec>(of[2 * t][i]), low = load_as<IVec>(of[2 * t + 1][i]);
                    store(to + i * kTileOutputs + t * 16, dequantize(high, low, w, tile * kTileOutputs + t * 16, scale[i]));
                }
        }
        return out;
    }
#endif

  private:
    static float* scales(const PackedWeights& w) { return w.per_output().template as<float>(); }
    static int32_t* weight_sums(const PackedWeights& w) {
        return w.per_output().template as<int32_t>() + size_t(w.num_outputs());
    }

    // Lane i of the result: acc + the products of four bytes of x and the four weights of output i.
    static IVec add_fours(IVec acc, const int8_t* weights, const uint8_t* x) {
#if defined(__AVX512VNNI__)
        int32_t four;
        std::memcpy(&four, x, 4);
        return (IVec)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), _mm512_loadu_si512(weights));
#elif defined(__AVX2__)
        // Products of pairs of 16-bit integers: inputs 0 and 2 of each four, then 1 and 3.
        const __m256i even = _mm256_set1_epi32(x[0] | x[2] << 16), odd = _mm256_set1_epi32(x[1] | x[3] << 16);
        __m256i halves[2];
        std::memcpy(halves, &acc, sizeof halves);
        UNROLL for (int half = 0; half < 2; half++) {
            const __m256i fours = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights) + half);
            const __m256i lower = _mm256_srai_epi16(_mm256_slli_epi16(fours, 8), 8), upper = _mm256_srai_epi16(fours, 8);
            const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(lower, even), _mm256_madd_epi16(upper, odd));
            halves[half] = _mm256_add_epi32(halves[half], pairs);
        }
        std::memcpy(&acc, halves, sizeof acc);
        return acc;
#else
        UVec four = load_as<UVec>(weights);
        for (int i = 0; i < 4; i++) acc += ((IVec)(four << (24 - 8 * i)) >> 24) * int32_t(x[i]);
        return acc;
#endif
    }

    static Vec to_float(IVec v) { return __builtin_convertvector(v, Vec); }

    // Combines the two halves of the quantized sums: sum(w * x) = scales * (256 * (high - 128 * sum(w)) + low).
    static Vec dequantize(IVec high, IVec low, const PackedWeights& w, int output, float x_scale) {
        IVec sums = load_as<IVec>(weight_sums(w) + output);
        Vec exact = llama::fma(to_float(high - sums * 128), splat(256.0f), to_float(low));
        return exact * load(scales(w) + output) * splat(x_scale);
    }

    // N rows by S output tiles.
    template <int N, int S, bool Ask>
    static void products(const PackedWeights& w, const Quantized& x, size_t row, int tile, int distance, float* out) {
        const kernels::Streams<S> weights(w, tile, distance);
        IVec high[S][N][kRegisterTiles] = {}, low[S][N][kRegisterTiles] = {};
        for (size_t k = 0, at = 0; k < w.padded(); k += 64, at += kLayout.step_bytes)
            for (int four = 0; four < 16; four++) UNROLL for (int s = 0; s < S; s++) {
                    const char* line = weights[s] + at + four * 64;
                    if (Ask) UNROLL for (int t = 0; t < kRegisterTiles; t++) kernels::prefetch(line + t * kRegisterTileBytes);
                    UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                        auto column = reinterpret_cast<const int8_t*>(line + t * kRegisterTileBytes);
                        high[s][r][t] = add_fours(high[s][r][t], column, x.high[row + r] + k + four * 4);
                        low[s][r][t] = add_fours(low[s][r][t], column, x.low[row + r] + k + four * 4);
                    }
                }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const int output = (tile + s * distance) * kTileOutputs + t * kLanes;
            store(out + (s * N + r) * kTileOutputs + t * kLanes,
                  dequantize(high[s][r][t], low[s][r][t], w, output, x.scale()[row + r]));
        }
    }

#if defined(LLAMA_AMX)
    // Of 16 rows: the high bytes by the first register tile, the low bytes by it, then both by the second.
    using Sums = int32_t[2 * kRegisterTiles][16][16];

    static void add_products(const PackedWeights& w, const Quantized& x, size_t row, int rows, int tile, bool first, size_t from,
                             size_t to, Sums* sums) {
        const char* weights = w.output_tile(tile) + from * kTileOutputs;
        for (int r = 0; r < rows; r += 16) {
            auto kernel = first && r == 0 ? multiply_16<true> : multiply_16<false>;
            kernel(x.high[row + r] + from, x.low[row + r] + from, x.high.stride, weights, to - from, sums[r / 16], from == 0);
        }
    }

    // 16 rows: the output tile's two register tiles by the high and the low bytes of x.
    template <bool Ask>
    static void multiply_16(const uint8_t* high, const uint8_t* low, size_t stride, const char* weights, size_t padded, Sums& sums,
                            bool first_slice) {
        if (first_slice) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        } else {
            _tile_loadd(0, sums[0], 64); _tile_loadd(1, sums[1], 64);
            _tile_loadd(2, sums[2], 64); _tile_loadd(3, sums[3], 64);
        }
        for (size_t step = 0; step < padded / 64; step++, weights += kRegisterTiles * kRegisterTileBytes) {
            if (Ask) kernels::prefetch_tiles(weights);
            _tile_loadd(4, high + step * 64, stride);
            _tile_loadd(5, low + step * 64, stride);
            _tile_loadd(6, weights, 64);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 5, 6);
            _tile_loadd(7, weights + kRegisterTileBytes, 64);
            _tile_dpbusd(2, 4, 7);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
    }
#endif
};

}  // namespace llama
