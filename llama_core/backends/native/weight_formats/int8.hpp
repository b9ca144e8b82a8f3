// int8 weights with one scale for each output: [output tile][k / 64][2 register tiles][16 fours of k][16 outputs][4].
//
// Activations are multiplied as 16-bit integers in two bytes.
#pragma once

#include "byte_products.hpp"

namespace llama {

template <class T>
struct Int8Weights : ByteProducts {
    using Activation = T;
    static constexpr char kName[] = "int8";
    static constexpr WeightLayout kLayout{
        .step_inputs = 64, .step_bytes = kRegisterTiles * kRegisterTileBytes, .bytes_per_output = kBytesPerOutput};
    static constexpr InputForm kInputForm = InputForm::kRows;
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
        // With 16 rows, one pass over the weights multiplies both bytes of x. More rows take two passes: over a slice in the cache.
        const size_t slice = rows > 16 ? kSliceInputs : w.padded();
        alignas(64) Sums sums;
        for (size_t from = 0; from < w.padded(); from += slice) {
            const size_t to = std::min(w.padded(), from + slice);
            const char* weights = w.output_tile(tile) + from * kTileOutputs;
            const char* ahead = weights + (rows > 16 ? slice * kTileOutputs : kernels::kAhead);
            add_products(x, row, rows, from, to, weights, first ? Ahead{ahead, kLayout.step_bytes / 64 / 2} : Ahead(), sums);
        }
        ByteProducts::finish(w, x, row, rows, tile, sums, out);
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

    static void add_k_slice(const PackedWeights&, const Inputs<T>& x, size_t row, int rows, int, size_t from, size_t to,
                            const char* slice, void* sums) {
        add_products(x.quantized, row, rows, from, to, slice, Ahead(), *static_cast<Sums*>(sums));
    }

    static const float* finish(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, const void* sums,
                               float* out) {
        return ByteProducts::finish(w, x.quantized, row, rows, tile, *static_cast<const Sums*>(sums), out);
    }
#endif

  private:
    // Lane i of the result: acc + the products of four bytes of x and the four weights of output i.
    static IVec add_fours(IVec acc, const int8_t* weights, const uint8_t* x) {
#if defined(__AVX512VNNI__)
        int32_t four;
        std::memcpy(&four, x, 4);
        return (IVec)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), _mm512_loadu_si512(weights));
#elif defined(__AVX512BW__)
        // Products of pairs of 16-bit integers: inputs 0 and 2 of each four, then 1 and 3.
        const __m512i even = _mm512_set1_epi32(x[0] | x[2] << 16), odd = _mm512_set1_epi32(x[1] | x[3] << 16);
        const __m512i fours = _mm512_loadu_si512(weights);
        const __m512i lower = _mm512_srai_epi16(_mm512_slli_epi16(fours, 8), 8), upper = _mm512_srai_epi16(fours, 8);
        const __m512i pairs = _mm512_add_epi32(_mm512_madd_epi16(lower, even), _mm512_madd_epi16(upper, odd));
        return (IVec)_mm512_add_epi32((__m512i)acc, pairs);
#elif LLAMA_REGISTER_BYTES == 32  // AVX2, as above
        const __m256i even = _mm256_set1_epi32(x[0] | x[2] << 16), odd = _mm256_set1_epi32(x[1] | x[3] << 16);
        return by_registers(acc, load_as<IVec>(weights), [=](Register<int32_t> sums, Register<int32_t> fours) {
            const __m256i lower = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)fours, 8), 8);
            const __m256i upper = _mm256_srai_epi16((__m256i)fours, 8);
            const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(lower, even), _mm256_madd_epi16(upper, odd));
            return (Register<int32_t>)_mm256_add_epi32((__m256i)sums, pairs);
        });
#else
        UVec four = load_as<UVec>(weights);
        for (int i = 0; i < 4; i++) acc += ((IVec)(four << (24 - 8 * i)) >> 24) * int32_t(x[i]);
        return acc;
#endif
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
                        const uint8_t* bytes = x.high(row + r, k / 64) + four * 4;
                        high[s][r][t] = add_fours(high[s][r][t], column, bytes);
                        low[s][r][t] = add_fours(low[s][r][t], column, bytes + Quantized::kTileBytes);
                    }
                }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const int output = (tile + s * distance) * kTileOutputs + t * kLanes;
            store(out + (s * N + r) * kTileOutputs + t * kLanes,
                  dequantize_bytes(high[s][r][t], low[s][r][t], w, output, x.scale()[row + r]));
        }
    }

};

}  // namespace llama
