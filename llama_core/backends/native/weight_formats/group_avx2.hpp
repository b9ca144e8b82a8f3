// Grouped weights by activations in groups of 8-bit integers, on AVX2: a register holds 8 outputs.
//
// VPMADDUBSW adds two products of an unsigned and a signed byte into 16 bits: codes give their sign to the activations.
#pragma once

#include "group_codes.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512VNNI__)
#define LLAMA_GROUP_AVX2 1

namespace llama {
namespace kernels {

constexpr int kColumns = kTileOutputs / 8;  // of an output tile: 8 outputs each

inline __m256i load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i broadcast_four(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
inline __m256 column_of(const char* step, size_t at, int column) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(step + at) + column));
}

// The codes of 8 outputs in one group: a register for each four of k.
struct ColumnCodes {
    static void read(const char* halves, int column, __m256i* codes) {
        const char* line = halves + column / 2 * ByteCodes::kHalfBytes + column % 2 * 32;
        UNROLL for (int f = 0; f < kFours; f++) codes[f] = load_codes(line + f * 64);
    }

    // The dot products of N rows with each of M columns.
    template <int N, int M>
    static void dots(const __m256i (*codes)[kFours], const GroupRows& x, int row, size_t g, __m256i (*out)[M]) {
        const __m256i ones = _mm256_set1_epi16(1);
        UNROLL for (int f = 0; f < kFours; f++) {
            __m256i magnitudes[M];
            UNROLL for (int m = 0; m < M; m++) magnitudes[m] = _mm256_abs_epi8(codes[m][f]);
            UNROLL for (int r = 0; r < N; r++) {
                const __m256i four = broadcast_four(x.group(row + r, g) + f * 4);
                UNROLL for (int m = 0; m < M; m++) {
                    const __m256i pairs = _mm256_maddubs_epi16(magnitudes[m], _mm256_sign_epi8(four, codes[m][f]));
                    const __m256i fours = _mm256_madd_epi16(pairs, ones);
                    out[r][m] = f ? _mm256_add_epi32(out[r][m], fours) : fours;
                }
            }
        }
    }
};

// The same operations in the same order as add_group.
inline __m256 add_column(__m256 acc, __m256i dot, __m256 scales, float x_scale) {
    return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(x_scale)), scales, acc);
}

// Few rows: codes are read from memory, sums stay in registers.
template <class F, int N, int S, bool Ask>
inline void few_rows(const PackedWeights& w, const GroupRows& x, int tile, int distance, float* out) {
    using Step = GroupStep<F>;
    const Streams<S> weights(w, tile, distance);
    __m256 acc[S][kColumns][N];
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int c = 0; c < kColumns; c++) UNROLL for (int r = 0; r < N; r++)
        acc[s][c][r] = _mm256_setzero_ps();
    for (size_t g = 0, at = 0; g < w.padded() / kGroupInputs; g++, at += Step::kBytes)
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int c = 0; c < kColumns; c++) {
            const char* step = weights[s] + at;
            if (Ask)
                for (size_t line = c; line < Step::kLines; line += kColumns) prefetch(step + line * 64);
            __m256i codes[1][kFours], dots[N][1];
            ColumnCodes::read(Step::codes(step, 0), c, codes[0]);
            ColumnCodes::dots<N, 1>(codes, x, 0, g, dots);
            const __m256 scales = column_of(step, Step::kScales, c);
            UNROLL for (int r = 0; r < N; r++) acc[s][c][r] = add_column(acc[s][c][r], dots[r][0], scales, x.scale(r, g));
        }
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int c = 0; c < kColumns; c++)
        _mm256_storeu_ps(out + (s * N + r) * kTileOutputs + c * 8, acc[s][c][r]);
}

// The rows of a block by a group whose codes lie expanded in the cache; the sums lie there too.
template <int N>
inline void add_block(const __m256i (*codes)[kFours], const __m256* scales, const GroupRows& x, int row, size_t g, float* out) {
    UNROLL for (int c = 0; c < kColumns; c += 2) {
        __m256i dots[N][2];
        ColumnCodes::dots<N, 2>(codes + c, x, row, g, dots);
        UNROLL for (int r = 0; r < N; r++) UNROLL for (int m = 0; m < 2; m++) {
            float* to = out + (row + r) * kTileOutputs + (c + m) * 8;
            const __m256 acc = _mm256_load_ps(to);
            _mm256_store_ps(to, add_column(acc, dots[r][m], scales[c + m], x.scale(row + r, g)));
        }
    }
}

template <class F>
inline void many_rows(const PackedWeights& w, const GroupRows& x, int rows, int tile, bool first, float* out) {
    using Step = GroupStep<F>;
    constexpr int kBlock = 2;  // rows whose sums fit in registers
    const char* step = w.output_tile(tile);
    std::fill(out, out + rows * kTileOutputs, 0.0f);
    for (size_t g = 0; g < w.padded() / kGroupInputs; g++, step += Step::kBytes) {
        if (first)
            for (size_t line = 0; line < Step::kLines; line++) prefetch(step + line * 64);
        __m256i codes[kColumns][kFours];
        __m256 scales[kColumns];
        UNROLL for (int c = 0; c < kColumns; c++) {
            ColumnCodes::read(Step::codes(step, 0), c, codes[c]);
            scales[c] = column_of(step, Step::kScales, c);
        }
        asm volatile("" ::: "memory");  // the codes are read from the cache below, instead of being expanded again
        int row = 0;
        for (; row + kBlock <= rows; row += kBlock) add_block<kBlock>(codes, scales, x, row, g, out);
        for (; row < rows; row++) add_block<1>(codes, scales, x, row, g, out);
    }
}

template <class F>
inline void multiply_groups(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                            float* out) {
    constexpr int kFew = 2;
    if (rows > kFew) return many_rows<F>(w, GroupRows(x.groups, row), rows, tile, first, out);
    by_rows<kFew>(rows, first, [&](auto n, auto ask, int r) {
        few_rows<F, n, 1, ask>(w, GroupRows(x.groups, row + r), tile, 0, out + r * kTileOutputs);
    });
}

template <class F>
inline void multiply_group_streams(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, int distance,
                                   float* out) {
    by_streams<2>(rows, [&](auto n, auto streams, int s) {
        few_rows<F, n, streams, true>(w, GroupRows(x.groups, row), tile + s * distance, distance, out + s * n * kTileOutputs);
    });
}

}  // namespace kernels
}  // namespace llama
#endif
