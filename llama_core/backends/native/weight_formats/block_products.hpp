// Products of blocks of weights (block_codings.hpp) by activations of 16 bits (Quantized).
//
// Sums over a block are exact integers, and the sums of blocks are added as floats in their order: acc + sum * step. So all kernels and
// builds give the same bits, for any number of rows.
#pragma once

#include "block_packing.hpp"

// Keeps a loop of a few hundred instructions: unrolled ones compile for a minute, and are no faster.
#define ROLLED _Pragma("GCC unroll 1")

namespace llama {
namespace kernels {

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
// step, which would fill the line buffers that its loads need: it moves neither of these two functions over the other.
inline void prefetch_in_place(const char* p) {
#if defined(__AVX512F__)
    asm volatile("prefetcht1 %a0" ::"p"(p + kAhead));
    asm volatile("prefetcht0 %a0" ::"p"(p + 1280));
#else
    prefetch(p);
#endif
}
inline void keep_in_place([[maybe_unused]] IVec& v) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(v));
#endif
}

// The results of sums: with the scales of the rows.
inline void scale_rows(const Quantized& x, size_t row, int rows, const float* sums, float* out) {
    for (int r = 0; r < rows; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const int at = r * kTileOutputs + t * kLanes;
            store(out + at, load(sums + at) * splat(x.scale()[row + r]));
        }
}

// Adds the products of a block to `out`, of N rows. weights: 16-bit numbers [pairs][32 outputs][2]; steps: of the outputs.
template <int N>
inline void add_expanded(const char* weights, int pairs, const Quantized& x, size_t row, size_t from, const float* steps, float* out) {
    IVec sums[N][kRegisterTiles] = {};
    for (int pair = 0; pair < pairs; pair++, weights += kRegisterTiles * 64) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const UVec column = load_as<UVec>(weights + t * 64);
            UNROLL for (int r = 0; r < N; r++) sums[r][t] = add_pairs(sums[r][t], column, x.pairs[row + r] + from + pair * 2);
        }
    UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
        float* to = out + r * kTileOutputs + t * kLanes;
        store(to, fma(to_float(sums[r][t]), load(steps + t * kLanes), load(to)));
    }
}

#if defined(LLAMA_AMX)
using BlockSums = int32_t[2][kMaxRows / 16][kRegisterTiles][16][16];  // [high and low bytes][half of the rows]...[row][output]

// Where prefetches begin, or null, and lines of each step. They are spread over the products: requests come as fast as memory serves.
struct Ahead {
    const char* from = nullptr;
    size_t lines = 0;
};

// Two register tiles of activations by the two of an output tile: of 32 rows one byte after the other, of 16 rows both.
template <int kHalves>
inline void multiply_tiles(const Quantized& x, const uint8_t* high, size_t steps, const char* weights, Ahead ahead, BlockSums& sums) {
    const size_t other = kHalves == 2 ? x.steps * Quantized::kStepBytes : size_t(Quantized::kTileBytes);
    for (int byte = 0; byte < kHalves; byte++) {
        const uint8_t* inputs = high + byte * Quantized::kTileBytes;
        const char* columns = weights;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (size_t step = 0; step < steps; step++, inputs += Quantized::kStepBytes, columns += kRegisterTiles * kRegisterTileBytes) {
            if (ahead.from)
                for (size_t line = 0; line < ahead.lines / kHalves; line++, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
            _tile_loadd(6, columns, 64);
            _tile_loadd(4, inputs, Quantized::kStep);
            _tile_loadd(7, columns + kRegisterTileBytes, 64);
            _tile_loadd(5, inputs + other, Quantized::kStep);
            if (byte) {
                _tile_dpbusd(0, 4, 6); _tile_dpbusd(1, 4, 7); _tile_dpbusd(2, 5, 6); _tile_dpbusd(3, 5, 7);
            } else {
                _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7);
                if (kHalves == 2) {
                    _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
                } else {
                    _tile_dpbusd(2, 5, 6); _tile_dpbusd(3, 5, 7);
                }
            }
        }
        auto& second = kHalves == 2 ? sums[byte][1] : sums[1][0];
        _tile_stored(0, sums[byte][0][0], 64); _tile_stored(1, sums[byte][0][1], 64);
        _tile_stored(2, second[0], 64); _tile_stored(3, second[1], 64);
    }
}

// Adds the products of inputs from .. to, which are a block, to `out` [kMaxRows][kTileOutputs]; from = 0 begins new sums. weights:
// bytes [step][register tile][16 fours of k][16 outputs][4]. Rows beyond `rows` are products of the memory after x, and nothing reads
// them.
inline void add_block(const Quantized& x, size_t row, int rows, size_t from, size_t to, const char* weights, const float* steps,
                      Ahead ahead, float* out) {
    if (from == 0) std::memset(out, 0, (rows > 16 ? 32 : 16) * kTileOutputs * sizeof(float));
    asm volatile("" ::"r"(weights) : "memory");  // GCC's tile loads declare no reads
    const uint8_t* high = x.high(row, from / kStepInputs);
    alignas(64) BlockSums sums;
    const auto multiply = rows > 16 ? multiply_tiles<2> : multiply_tiles<1>;
    multiply(x, high, (to - from) / kStepInputs, weights, ahead, sums);
    asm volatile("" ::"r"(sums) : "memory");
    for (int half = 0; half < (rows > 16 ? 2 : 1); half++)
        for (int t = 0; t < kRegisterTiles; t++) {
            const Vec step = load(steps + t * kLanes);
            UNROLL for (int r = 0; r < 16; r++) {
                const IVec upper = load_as<IVec>(sums[0][half][t][r]), lower = load_as<IVec>(sums[1][half][t][r]);
                float* to = out + (half * 16 + r) * kTileOutputs + t * kLanes;
                store(to, fma(to_float((upper << 8) + lower), step, load(to)));
            }
        }
}
#endif

}  // namespace kernels

template <class T, class C>
struct BlockWeights : BlockPacking<C> {
    using Activation = T;
    using Layout = BlockLayout<C>;
    static constexpr WeightLayout kLayout{.step_inputs = kStepInputs,
                                          .step_bytes = Layout::kStepBytes,
                                          .block_inputs = kBlockInputs,
                                          .head_bytes = Layout::kHeadBytes};
    static constexpr InputForm kInputForm = InputForm::kRows;
    static constexpr size_t kSliceInputs = kBlockInputs;
    static constexpr int kMaxInputs = INT_MAX;

    static void multiply(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, bool first, float* out) {
#if defined(LLAMA_AMX)
        if (!x.quantized.is_few(row, rows)) return multiply_tiles(w, x.quantized, row, rows, tile, first, out);
#endif
        if (rows > kFewRows) return multiply_in_cache(w, x.quantized, row, rows, tile, first, out);
        kernels::by_rows<kFewRows>(rows, false, [&](auto n, auto, int r) {
            products<n, 1>(w, x.quantized, row + r, tile, 0, out + r * kTileOutputs);
        });
    }

    static void multiply_streams(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, int distance,
                                 float* out) {
        kernels::by_streams<kStreamSums>(rows, [&](auto n, auto streams, int s) {
            products<n, streams>(w, x.quantized, row, tile + s * distance, distance, out + s * n * kTileOutputs);
        });
    }

#if defined(LLAMA_AMX)
    // In the form that register tiles multiply: [step][register tile][16 fours of k][16 outputs][4].
    static void expand(const PackedWeights& w, int tile, size_t from, size_t to, char* out) {
        const char* block = w.output_tile(tile) + w.offset(from);
        if constexpr (C::kBits == 8) {
            std::memcpy(out, block + Layout::kHeadBytes, (to - from) * kTileOutputs);
            return;
        }
        for (int step = 0; step < int((to - from) / kStepInputs); step++)
            for (int t = 0; t < kRegisterTiles; t++, out += kRegisterTileBytes)
                each_pair(block, step, t, [&](int line, UVec a, UVec b, UVec c, UVec d) {
                    store_as(out + line * 128, (a & 0x00ff00ffu) | (b << 8 & 0xff00ff00u));
                    store_as(out + line * 128 + 64, (c & 0x00ff00ffu) | (d << 8 & 0xff00ff00u));
                });
    }

    static void add_k_slice(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, size_t from, size_t to,
                            const char* slice, void* sums) {
        const char* block = w.output_tile(tile) + w.offset(from);
        kernels::add_block(x.quantized, row, rows, from, to, slice, steps_of(block), {}, static_cast<float*>(sums));
    }

    static const float* finish(const PackedWeights&, const Inputs<T>& x, size_t row, int rows, int, const void* sums,
                               float* out) {
        kernels::scale_rows(x.quantized, row, rows, static_cast<const float*>(sums), out);
        return out;
    }
#endif

  private:
    static constexpr int kLines = kStepInputs / 8;

    // Rows by streams whose sums fit in the registers beside the weights, and rows of which products expand weights in registers.
#if defined(__AVX512F__)
    static constexpr int kStreamSums = 6, kFewRows = C::kBits == 8 ? 8 : 4, kCacheRows = 8;
#else
    static constexpr int kStreamSums = 1, kFewRows = 1, kCacheRows = 2;
#endif

    static const float* steps_of(const char* block) { return reinterpret_cast<const float*>(block); }
    static UVec units_of(const char* block, int t) {
        return Layout::kIsShort ? kernels::twice(block + Layout::kUnits + t * 32) : UVec{};
    }
    static kernels::Group<C> group_of(const char* block, int step, int line, int t, UVec units) {
        constexpr int kOfStep = kStepInputs / (Layout::kHeadGroups ? int(kStepInputs) : C::kGroup);
        const int input = step * int(kStepInputs) + line * 8, index = line * 8 / C::kGroup;
        const int first = Layout::kBytesAlone ? step * kOfStep : input / C::kGroup;
        return kernels::Group<C>(block + Layout::group(first), index, t, units);
    }
    // Lines of a step whose groups are the same.
    static constexpr int kGroupLines = std::min(C::kGroup / 8, kLines);

    // N rows by S output tiles.
    template <int N, int S>
    static void products(const PackedWeights& w, const Quantized& x, size_t row, int tile, int distance, float* out) {
        const kernels::Streams<S> streams(w, tile, distance);
        Vec acc[S][N][kRegisterTiles] = {};
        for (size_t from = 0, at = 0; from < w.padded(); from += kBlockInputs, at += Layout::kBlockBytes) {
            IVec sums[S][N][kRegisterTiles] = {};
            const int steps = int(std::min(w.padded() - from, kBlockInputs) / kStepInputs);
            const char* blocks[S];
            UNROLL for (int s = 0; s < S; s++) blocks[s] = streams[s] + at;
            UVec units[S][kRegisterTiles];
            UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < kRegisterTiles; t++) units[s][t] = units_of(blocks[s], t);
            for (int step = 0; step < steps; step++) {
                const int16_t* inputs[N];
                UNROLL for (int r = 0; r < N; r++) inputs[r] = x.pairs[row + r] + from + step * kStepInputs;
                const char* halves[S][kRegisterTiles];
                UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < kRegisterTiles; t++) halves[s][t] = blocks[s] + Layout::half(step, t);
                ROLLED for (int first = 0; first < kLines; first += kGroupLines) {
                    kernels::Group<C> groups[S][kRegisterTiles];
                    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < kRegisterTiles; t++) groups[s][t] =
                        group_of(blocks[s], step, first, t, units[s][t]);
                    ROLLED for (int line = first; line < first + kGroupLines; line++) {
                        add_pair<0>(halves, groups, inputs, line, sums);
                        add_pair<1>(halves, groups, inputs, line, sums);
                        add_pair<2>(halves, groups, inputs, line, sums);
                        add_pair<3>(halves, groups, inputs, line, sums);
                    }
                }
            }
            UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++)
                acc[s][r][t] = fma(to_float(sums[s][r][t]), load(steps_of(blocks[s]) + t * kLanes), acc[s][r][t]);
        }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++)
            store(out + (s * N + r) * kTileOutputs + t * kLanes, acc[s][r][t] * splat(x.scale()[row + r]));
    }

    // Sums of neighbouring instructions are independent: each waits for its last product.
    template <int kPair, int N, int S>
    [[gnu::always_inline]] static inline void add_pair(const char* const (&halves)[S][kRegisterTiles],
                                                       const kernels::Group<C> (&groups)[S][kRegisterTiles],
                                                       const int16_t* const (&inputs)[N], int line,
                                                       IVec (&sums)[S][N][kRegisterTiles]) {
        // The lines of a step in equal parts, in the order in which they lie.
        constexpr size_t parts = kLines * 4, lines = (Layout::kStepBytes + 63) / 64;
        const size_t part = line * 4 + kPair;
        UNROLL for (int s = 0; s < S; s++) UNROLL for (size_t i = part * lines / parts; i < (part + 1) * lines / parts; i++)
            kernels::prefetch_in_place(halves[s][0] - Layout::kCodes + i * 64);
        kernels::keep_in_place(sums[S - 1][N - 1][kRegisterTiles - 1]);
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            const UVec column = groups[s][t].template weights<kPair>(halves[s][t], line);
            UNROLL for (int r = 0; r < N; r++) sums[s][r][t] =
                kernels::add_pairs(sums[s][r][t], column, inputs[r] + line * 8 + kPair * 2);
        }
    }

    // Calls put(step, t, pair of the step, weights of 16 outputs).
    template <class Put>
    static void each_pair(const char* block, int step, int t, Put&& put) {
        const char* half = block + Layout::half(step, t);
        const UVec units = units_of(block, t);
        UNROLL for (int first = 0; first < kLines; first += kGroupLines) {
            const kernels::Group<C> group = group_of(block, step, first, t, units);
            UNROLL for (int line = first; line < first + kGroupLines; line++)
                put(line, group.template weights<0>(half, line), group.template weights<1>(half, line),
                    group.template weights<2>(half, line), group.template weights<3>(half, line));
        }
    }

    // More rows: a block is expanded once for all rows, to 16 KiB of 16-bit weights [128 pairs][32 outputs][2].
    static void multiply_in_cache(const PackedWeights& w, const Quantized& x, size_t row, int rows, int tile, bool first,
                                  float* out) {
        alignas(64) char expanded[kBlockInputs * kTileOutputs * sizeof(int16_t)];
        const char* block = w.output_tile(tile);
        std::memset(out, 0, rows * kTileOutputs * sizeof(float));
        for (size_t from = 0; from < w.padded(); from += kBlockInputs, block += Layout::kBlockBytes) {
            const int steps = int(std::min(w.padded() - from, kBlockInputs) / kStepInputs);
            if (first)
                for (size_t line = 0; line < Layout::kBlockBytes; line += 64) kernels::prefetch(block + line);
            for (int step = 0; step < steps; step++)
                for (int t = 0; t < kRegisterTiles; t++)
                    each_pair(block, step, t, [&](int line, UVec a, UVec b, UVec c, UVec d) {
                        char* to = expanded + (step * kLines + line) * 4 * kRegisterTiles * 64 + t * 64;
                        store_as(to, a), store_as(to + 128, b), store_as(to + 256, c), store_as(to + 384, d);
                    });
            kernels::by_rows<kCacheRows>(rows, false, [&](auto n, auto, int r) {
                kernels::add_expanded<n>(expanded, steps * kLines * 4, x, row + r, from, steps_of(block), out + r * kTileOutputs);
            });
        }
        kernels::scale_rows(x, row, rows, out, out);
    }

#if defined(LLAMA_AMX)
    // `first`: no earlier rows used the output tile, so its weights come from memory.
    static void multiply_tiles(const PackedWeights& w, const Quantized& x, size_t row, int rows, int tile, bool first, float* out) {
        alignas(64) char expanded[C::kBits == 8 ? 64 : kBlockInputs * kTileOutputs];
        for (size_t from = 0; from < w.padded(); from += kBlockInputs) {
            const size_t to = std::min(w.padded(), from + kBlockInputs);
            const char *block = w.output_tile(tile) + w.offset(from), *weights = block + Layout::kHeadBytes;
            const kernels::Ahead ahead{first ? block + Layout::kBlockBytes : nullptr, (Layout::kBlockBytes / 64 + 3) / 4};
            if constexpr (C::kBits < 8) {
                expand(w, tile, from, to, expanded);
                weights = expanded;
            }
            kernels::add_block(x, row, rows, from, to, weights, steps_of(block), ahead, out);
        }
        kernels::scale_rows(x, row, rows, out, out);
    }
#endif
};

}  // namespace llama
