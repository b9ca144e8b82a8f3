// 4-bit weights in groups by bfloat16 activations: kernels expand the codes to 8-bit weights with one scale for each output.
//
// A weight becomes a whole number of its output's steps: weight = step * (round(code * factor / 128) + offset), at most 127 steps.
// `factor` and `offset` are 16-bit integers that lie where group_codes.hpp has scales and minima: about 128 * scale / step and
// minimum / step. In a coding without minima, offset = -round(8 * factor / 128), which is not stored. Rounded one by one, the two
// would shift all weights of a group by up to half a step, which costs more than errors that differ from weight to weight:
// SmolLM2's perplexity rose by 1.2 % instead of 0.3 %. `nearest` takes the pair of integers whose weights are nearest to the group's.
//
// Products of few rows expand weights to 16 bits in registers, products of more rows in the cache, and tile registers multiply
// weights of 8 bits. All are exact (byte_products.hpp).
#pragma once

#include <vector>

#include "byte_products.hpp"
#include "group_codes.hpp"
#include "grouped.hpp"

namespace llama {
namespace kernels {

// Of each 16-bit lane: (a * b + 2^14) / 2^15, rounded down.
inline UVec multiply_high_rounded(UVec a, UVec b) {
#if defined(__AVX512BW__)
    return (UVec)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#elif LLAMA_REGISTER_BYTES == 32  // AVX2
    return by_registers(a, b, [](Register<uint32_t> x, Register<uint32_t> y) {
        return (Register<uint32_t>)_mm256_mulhrs_epi16((__m256i)x, (__m256i)y);
    });
#else
    const IVec lower = ((IVec)(a << 16) >> 16) * ((IVec)(b << 16) >> 16), upper = ((IVec)a >> 16) * ((IVec)b >> 16);
    return ((UVec)(lower + 0x4000) >> 15 & 0xffffu) | (UVec)(upper + 0x4000) >> 15 << 16;
#endif
}

// Lane o of the result: acc + the products of two 16-bit weights of output o and two activations.
inline IVec add_pairs(IVec acc, UVec weights, const int16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
#if defined(__AVX512VNNI__)
    return (IVec)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    const __m512i products = _mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
    return (IVec)_mm512_add_epi32((__m512i)acc, products);
#elif LLAMA_REGISTER_BYTES == 32  // AVX2
    return by_registers(acc, (IVec)weights, [=](Register<int32_t> sums, Register<int32_t> w) {
        return (Register<int32_t>)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(pair)));
    });
#else
    return acc + ((IVec)(weights << 16) >> 16) * int32_t(x[0]) + ((IVec)weights >> 16) * int32_t(x[1]);
#endif
}

// Prefetches into the second-level cache, and what is used soon into the first. The compiler must not gather the prefetches of a
// group, which would fill the line buffers that its loads need: it moves neither of these two functions over the other.
template <size_t kSoon>
inline void prefetch_in_place(const char* p) {
#if defined(__AVX512F__)
    asm volatile("prefetcht1 %a0" ::"p"(p + kAhead));
    asm volatile("prefetcht0 %a0" ::"p"(p + kSoon));
#else
    prefetch(p);
#endif
}
inline void keep_in_place([[maybe_unused]] IVec& v) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(v));
#endif
}

}  // namespace kernels

// C: a coding of 4 bits (grouped.hpp).
template <class C>
struct RequantizedWeights : C, ByteProducts {
    using Activation = bf16;
    using Step = GroupStep<C>;
    static constexpr WeightLayout kLayout{
        .step_inputs = kGroupInputs, .step_bytes = Step::kBytes, .bytes_per_output = kBytesPerOutput};
    static constexpr InputForm kInputForm = InputForm::kRows;

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        std::vector<CodedGroup> groups = num_groups(w);
        float values[kGroupInputs];
        for (int k = 0; k < w.inputs(); k += kGroupInputs) {
            const int count = std::min(kGroupInputs, w.inputs() - k);
            for (int i = 0; i < count; i++) values[i] = widen(source[k + i]);
            C::encode(values, count, groups[k / kGroupInputs]);
        }
        put(w, output, groups);
    }

    static void pack_groups(const PackedWeights& w, const GroupedRow& source, int output) {
        std::vector<CodedGroup> groups = num_groups(w);
        for (size_t g = 0; g < groups.size(); g++) {
            for (int i = 0; i < kGroupInputs; i++) groups[g].codes[i] = C::stored_code(source.codes[g * kGroupInputs + i]);
            groups[g].scale = to_half(source.scales[g]);
            if (C::kMinima) groups[g].minimum = to_half(source.minima[g]);
        }
        put(w, output, groups);
    }

    static void multiply(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                         float* out) {
#if defined(LLAMA_AMX)
        if (row + rows > Quantized::kMostNumberRows) return multiply_tiles(w, x.quantized, row, rows, tile, first, out);
#endif
        if (rows > kFewRows) return multiply_in_cache(w, x.quantized, row, rows, tile, first, out);
        kernels::by_rows<kFewRows>(rows, first, [&](auto n, auto ask, int r) {
            products<n, 1, ask>(w, x.quantized, row + r, tile, 0, out + r * kTileOutputs);
        });
    }

    static void multiply_streams(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, int distance,
                                 float* out) {
        kernels::by_streams<kStreamSums>(rows, [&](auto n, auto streams, int s) {
            products<n, streams, true>(w, x.quantized, row, tile + s * distance, distance, out + s * n * kTileOutputs);
        });
    }

#if defined(LLAMA_AMX)
    // In the form that Int8Weights has in memory: 16 fours of k, of two groups, for each register tile.
    static void expand(const PackedWeights& w, int tile, size_t from, size_t to, char* out) {
        const char* step = w.output_tile(tile) + from / kGroupInputs * Step::kBytes;
        for (size_t k = from; k < to; k += kGroupInputs, step += Step::kBytes) {
            char* tiles = out + (k - from) / Quantized::kStep * kRegisterTiles * kRegisterTileBytes;
            const size_t half = k % Quantized::kStep * 16;
            for (int t = 0; t < kRegisterTiles; t++) expand_bytes(step, t, tiles + t * kRegisterTileBytes + half);
            if (k + kGroupInputs == w.padded() && half == 0)
                for (int t = 0; t < kRegisterTiles; t++)
                    std::memset(tiles + t * kRegisterTileBytes + kRegisterTileBytes / 2, 0, kRegisterTileBytes / 2);
        }
    }

    static void add_k_slice(const PackedWeights&, const Inputs<bf16>& x, size_t row, int rows, int, size_t from, size_t to,
                            const char* slice, void* sums) {
        add_products(x.quantized, row, rows, from, to, slice, Ahead(), *static_cast<Sums*>(sums));
    }

    static const float* finish(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, const void* sums,
                               float* out) {
        return ByteProducts::finish(w, x.quantized, row, rows, tile, *static_cast<const Sums*>(sums), out);
    }
#else
    static constexpr std::nullptr_t expand = nullptr;
#endif

  private:
    static constexpr int kLines = kFours / 2;   // of codes: each has two fours of k
    static constexpr size_t kExactGroups = 16;  // products of so many fit into 32 bits: 127 * 32,767 * 512 < 2^31
    static constexpr int kMaxFactor = 2047, kMaxWeight = 127;
    static constexpr float kSteps = kMaxWeight - 1;  // of the largest weight: factor and offset may each round up

    // Rows by streams whose sums fit in the registers beside the weights, and rows of which products expand weights in registers.
#if defined(__AVX512F__)
    static constexpr int kStreamSums = 8, kFewRows = Quantized::kFewRows, kCacheRows = 8;
#else
    static constexpr int kStreamSums = 2, kFewRows = 1, kCacheRows = 2;
#endif

    static std::vector<CodedGroup> num_groups(const PackedWeights& w) {
        return std::vector<CodedGroup>(w.padded() / kGroupInputs);
    }

    static int rounded(int code, int factor) { return (code * factor + 64) >> 7; }

    static void put(const PackedWeights& w, int output, const std::vector<CodedGroup>& groups) {
        float step = 0;
        bool is_finite = true;
        for (const CodedGroup& group : groups) {
            const float scale = widen(group.scale), minimum = C::kMinima ? widen(group.minimum) : -C::kOffset * scale;
            const float largest = std::max(std::fabs(minimum), std::fabs(minimum + 15 * scale));
            is_finite = is_finite && std::isfinite(scale) && std::isfinite(minimum);
            step = std::max({step, largest / kSteps, std::fabs(scale) * (128.0f / kMaxFactor)});
        }
        if (!is_finite) step = NAN;
        const float inverse = step > 0 ? 1.0f / step : 0.0f;
        int32_t total = 0;
        for (size_t g = 0; g < groups.size(); g++) {
            char* to = w.output_tile(output / kTileOutputs) + g * Step::kBytes;
            const int place = output % kTileOutputs;
            const Pair pair = std::isfinite(inverse) && inverse > 0 ? nearest(groups[g], inverse) : Pair{};
            reinterpret_cast<int16_t*>(to + Step::kScales)[place] = int16_t(pair.factor);
            if (C::kMinima) reinterpret_cast<int16_t*>(to + Step::kMinima)[place] = int16_t(pair.offset);
            for (int k = 0; k < kGroupInputs; k++) {
                HalfByteCodes::put(to + Step::kCodes + place / 16 * HalfByteCodes::kHalfBytes, place % 16, k,
                                   groups[g].codes[k]);
                total += rounded(groups[g].codes[k], pair.factor) + pair.offset;
            }
        }
        scales(w)[output] = step;
        weight_sums(w)[output] = total;
    }

    struct Pair {
        int factor = 0, offset = 0;
    };
    // The sixteen weights that a group may have, in 256ths of a step, and how often each occurs.
    struct Histogram {
        alignas(64) int32_t targets[16], counts[16] = {};

        // The weights' squared errors and a quarter of the square of their sum; INT32_MAX where a weight does not fit into 8 bits.
        // Integers, because all builds must choose alike. Errors of over 8 steps are alike: the best pair has none.
        int32_t error(Pair pair) const {
            constexpr int kMost = 8 * 256;
            int32_t squares = 0, sum = 0, largest = 0;
            for (int code = 0; code < 16; code++) {
                const int weight = rounded(code, pair.factor) + pair.offset;
                const int error = std::clamp(weight * 256 - targets[code], -kMost, kMost);
                squares += counts[code] * error * error;
                sum += counts[code] * error;
                largest = std::max(largest, std::abs(weight));
            }
            return largest <= kMaxWeight ? squares + sum * (sum / 4) : INT32_MAX;
        }
    };

    // The factor and the offset whose weights are nearest to the group's. inverse: of the output's step.
    static Pair nearest(const CodedGroup& group, float inverse) {
        const double scale = widen(group.scale) * inverse;
        const double minimum = C::kMinima ? double(widen(group.minimum) * inverse) : -C::kOffset * scale;
        Histogram histogram;
        for (int code = 0; code < 16; code++)
            histogram.targets[code] = int32_t(std::floor(256 * (code * scale + minimum) + 0.5));
        int sum = 0, squares = 0;
        for (int code : group.codes) {
            histogram.counts[code]++;
            sum += code;
            squares += code * code;
        }
        Pair best;
        int32_t least = INT32_MAX;
        auto consider = [&](int factor, int offset) {
            const Pair pair{std::clamp(factor, -kMaxFactor, kMaxFactor), offset};
            const int32_t error = histogram.error(pair);
            if (error < least) {
                least = error;
                best = pair;
            }
        };
        const int factor = int(std::lrint(128 * scale));
        if constexpr (C::kMinima) {
            consider(factor, int(std::lrint(minimum)));  // always fits
            const int below = int(std::floor(minimum));
            for (int offset = below; offset <= below + 1; offset++) {
                // A larger factor makes up for what the offset lacks: where the derivative of `error` is zero. The division is the
                // last operation: no build joins it with the addition.
                const double lacking = (minimum - offset) * (sum * (1 + kGroupInputs / 4));
                const double change = lacking / std::max(1.0, squares + sum * double(sum) / 4);
                for (int by = -1; by <= 1; by++) consider(int(std::lrint(128 * (scale + change))) + by, offset);
            }
        } else {
            for (int by = -3; by <= 3; by++) {
                const int near = std::clamp(factor + by, -kMaxFactor, kMaxFactor);
                consider(near, -rounded(C::kOffset, near));
            }
        }
        return best;
    }

    // 16-bit numbers of 16 outputs, each twice.
    static UVec twice(const char* numbers) {
#if defined(__AVX512F__)
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
        return (UVec)_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
#else
        const UVec wide = load_wide<UVec>(numbers);
        return wide | wide << 16;
#endif
    }

    // Of a group, for 16 outputs.
    static UVec factors_of(const char* step, int t) { return twice(step + Step::kScales + t * kLanes * sizeof(int16_t)); }
    // In codings without minima: negated.
    static UVec offsets_of(const char* step, int t) {
        if constexpr (C::kMinima) return twice(step + Step::kMinima + t * kLanes * sizeof(int16_t));
        return kernels::multiply_high_rounded(UVec{} + C::kOffset * 256 * 0x10001u, factors_of(step, t));
    }
    static UVec add_offsets(UVec weights, UVec offsets) {
        return (UVec)(C::kMinima ? (Halves)weights + (Halves)offsets : (Halves)weights - (Halves)offsets);
    }

    // Two fours of k from line j of the codes as weights without the offset: inputs 0 and 2 of the first four, its inputs 1 and 3,
    // then of the second. Reads from a neighbouring byte take the place of shifts: a code lies at bit 4 or 8 of its 16-bit lane.
    template <int kPair>
    static UVec weights(const char* step, int t, int j, UVec factors) {
        const char* line = Step::codes(step, t) + j * 64;
        if constexpr (kPair < 2)
            return kernels::multiply_high_rounded(load_as<UVec>(line - 1 + kPair) & 0x0f000f00u, factors);
        else
            return kernels::multiply_high_rounded(load_as<UVec>(line - 2 + kPair) & 0x00f000f0u, (UVec)((Halves)factors << 4));
    }

    // N rows by S output tiles.
    template <int N, int S, bool Ask>
    static void products(const PackedWeights& w, const Quantized& x, size_t row, int tile, int distance, float* out) {
        const kernels::Streams<S> streams(w, tile, distance);
        IVec upper[S][N][kRegisterTiles] = {}, lower[S][N][kRegisterTiles] = {};
        const size_t groups = w.padded() / kGroupInputs;
        for (size_t begin = 0; begin < groups; begin += kExactGroups) {
            IVec sums[S][N][kRegisterTiles] = {};
            const size_t end = std::min(groups, begin + kExactGroups);
            for (size_t g = begin; g < end; g++) {
                const char* steps[S];
                UVec factors[S][kRegisterTiles];
        UNROLL for (int s = 0; s < S; s++) {
                    steps[s] = streams[s] + g * Step::kBytes;
                    UNROLL for (int t = 0; t < kRegisterTiles; t++) factors[s][t] = factors_of(steps[s], t);
                }
                add_group<Ask>(steps, factors, x, row, g, sums);
            }
            UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                upper[s][r][t] += sums[s][r][t] >> 8;
                lower[s][r][t] += sums[s][r][t] & 255;
            }
        }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const int output = (tile + s * distance) * kTileOutputs + t * kLanes;
            store(out + (s * N + r) * kTileOutputs + t * kLanes,
                  dequantize(upper[s][r][t], lower[s][r][t], w, output, x.scale()[row + r]));
        }
    }

    // Sums of neighbouring instructions are independent: each waits for its last product.
    template <bool Ask, int N, int S>
    [[gnu::always_inline]] static inline void add_group(const char* const (&steps)[S], const UVec (&factors)[S][kRegisterTiles], const Quantized& x, size_t row,
                          size_t g, IVec (&sums)[S][N][kRegisterTiles]) {
        const int16_t* inputs[N];
        UNROLL for (int r = 0; r < N; r++) inputs[r] = x.pairs[row + r] + g * kGroupInputs;
        UNROLL for (int j = 0; j < kLines; j++) {
            add_pair<Ask, 0>(steps, factors, inputs, j, sums);
            add_pair<Ask, 1>(steps, factors, inputs, j, sums);
            add_pair<Ask, 2>(steps, factors, inputs, j, sums);
            add_pair<Ask, 3>(steps, factors, inputs, j, sums);
        }
        // The offsets, by the sum of the activations in two parts (Quantized).
        constexpr uint32_t kParts = C::kMinima ? 0x00010020u : 0xffffffe0u;  // 1 and 32, or -1 and -32
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const UVec offsets = (UVec)((Halves)offsets_of(steps[s], t) * (Halves)(UVec{} + kParts));
            UNROLL for (int r = 0; r < N; r++) sums[s][r][t] =
                kernels::add_pairs(sums[s][r][t], offsets, x.sums[row + r] + 2 * g);
        }
    }
    template <bool Ask, int kPair, int N, int S>
    [[gnu::always_inline]] static inline void add_pair(const char* const (&steps)[S], const UVec (&factors)[S][kRegisterTiles], const int16_t* const (&inputs)[N],
                         int j, IVec (&sums)[S][N][kRegisterTiles]) {
        if (Ask) {
            const size_t part = j * 4 + kPair, lines = S * Step::kLines, parts = kLines * 4;
            UNROLL for (size_t line = part * lines / parts; line < (part + 1) * lines / parts; line++)
                kernels::prefetch_in_place<2 * Step::kBytes>(steps[line / Step::kLines] + line % Step::kLines * 64);
            kernels::keep_in_place(sums[S - 1][N - 1][kRegisterTiles - 1]);
        }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const UVec column = weights<kPair>(steps[s], t, j, factors[s][t]);
            UNROLL for (int r = 0; r < N; r++) sums[s][r][t] =
                kernels::add_pairs(sums[s][r][t], column, inputs[r] + j * 8 + kPair * 2);
        }
    }

    // More rows: 8 groups at a time are expanded once for all rows, to 16 KiB of 16-bit weights.
    static void multiply_in_cache(const PackedWeights& w, const Quantized& x, size_t row, int rows, int tile, bool first,
                                  float* out) {
        constexpr size_t kGroups = 8, kGroupBytes = kGroupInputs * kTileOutputs * sizeof(int16_t);
        static_assert(kGroups <= kExactGroups);
        alignas(64) char expanded[kGroups * kGroupBytes];
        alignas(64) IVec upper[kMaxRows][kRegisterTiles], lower[kMaxRows][kRegisterTiles];
        std::memset(upper, 0, rows * sizeof upper[0]);
        std::memset(lower, 0, rows * sizeof lower[0]);
        const size_t groups = w.padded() / kGroupInputs;
        for (size_t begin = 0; begin < groups; begin += kGroups) {
            const size_t count = std::min(groups - begin, kGroups);
            for (size_t g = 0; g < count; g++) {
                const char* step = w.output_tile(tile) + (begin + g) * Step::kBytes;
                if (first)
                    for (size_t line = 0; line < Step::kLines; line++) kernels::prefetch(step + line * 64);
                for (int t = 0; t < kRegisterTiles; t++) expand_numbers(step, t, expanded + g * kGroupBytes + t * 64);
            }
            kernels::by_rows<kCacheRows>(rows, false, [&](auto n, auto, int r) {
                add_expanded<n>(expanded, count, x, row + r, begin, upper + r, lower + r);
            });
        }
        for (int r = 0; r < rows; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++)
                store(out + r * kTileOutputs + t * kLanes,
                      dequantize(upper[r][t], lower[r][t], w, tile * kTileOutputs + t * kLanes, x.scale()[row + r]));
    }

    // A group as 16-bit weights [16 pairs of k][2 register tiles][16 outputs][2], for register tile t of which `out` is the first.
    static void expand_numbers(const char* step, int t, char* out) {
        const UVec factors = factors_of(step, t), offsets = offsets_of(step, t);
        auto put = [&](int pair, UVec weights) {
            const UVec whole = add_offsets(weights, offsets);
            store_as(out + pair * kRegisterTiles * 64, whole);
        };
        UNROLL for (int j = 0; j < kLines; j++) {
            put(4 * j, weights<0>(step, t, j, factors));
            put(4 * j + 1, weights<1>(step, t, j, factors));
            put(4 * j + 2, weights<2>(step, t, j, factors));
            put(4 * j + 3, weights<3>(step, t, j, factors));
        }
    }

    template <int N>
    static void add_expanded(const char* weights, size_t groups, const Quantized& x, size_t row, size_t begin,
                             IVec (*upper)[kRegisterTiles], IVec (*lower)[kRegisterTiles]) {
        IVec sums[N][kRegisterTiles] = {};
        const size_t first = begin * kGroupInputs;
        for (size_t pair = 0; pair < groups * kGroupInputs / 2; pair++, weights += kRegisterTiles * 64) UNROLL for (int t = 0;
                                                                                                                 t < kRegisterTiles; t++) {
                const UVec column = load_as<UVec>(weights + t * 64);
                UNROLL for (int r = 0; r < N; r++) sums[r][t] =
                    kernels::add_pairs(sums[r][t], column, x.pairs[row + r] + first + pair * 2);
            }
        UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            upper[r][t] += sums[r][t] >> 8;
            lower[r][t] += sums[r][t] & 255;
        }
    }

#if defined(LLAMA_AMX)
    // A group as bytes [8 fours of k][16 outputs][4].
    static void expand_bytes(const char* step, int t, char* out) {
        const UVec factors = factors_of(step, t), offsets = offsets_of(step, t);
        auto put = [&](int four, UVec even, UVec odd) {
            const UVec bytes = (add_offsets(even, offsets) & 0x00ff00ffu) | (UVec)((Halves)add_offsets(odd, offsets) << 8);
            store_as(out + four * 64, bytes);
        };
        UNROLL for (int j = 0; j < kLines; j++) {
            put(2 * j, weights<0>(step, t, j, factors), weights<1>(step, t, j, factors));
            put(2 * j + 1, weights<2>(step, t, j, factors), weights<3>(step, t, j, factors));
        }
    }

    // `first`: no earlier rows used the output tile, so its weights come from memory.
    static void multiply_tiles(const PackedWeights& w, const Quantized& x, size_t row, int rows, int tile, bool first, float* out) {
        constexpr size_t kPackedBytes = kSliceInputs / kGroupInputs * Step::kBytes;
        constexpr size_t kPasses = 2 * kSliceInputs / Quantized::kStep;
        alignas(64) char expanded[kSliceInputs * kTileOutputs];
        alignas(64) Sums sums;
        const char* packed = w.output_tile(tile);
        for (size_t from = 0; from < w.padded(); from += kSliceInputs, packed += kPackedBytes) {
            const size_t to = std::min(w.padded(), from + kSliceInputs);
            expand(w, tile, from, to, expanded);
            const Ahead ahead{packed + kPackedBytes, (kPackedBytes / 64 + kPasses - 1) / kPasses};
            add_products(x, row, rows, from, to, expanded, first ? ahead : Ahead(), sums);
        }
        ByteProducts::finish(w, x, row, rows, tile, sums, out);
    }
#endif
};

}  // namespace llama
