// The matrix products of linear.hpp, for each format and instruction set, and their choice. Included by linear.hpp alone.
#pragma once

#include <type_traits>

#include "linear.hpp"

namespace llama {

namespace kernels {

// How far ahead of its use a stream of weights is prefetched: hardware prefetchers stop at every 4 KiB page. Into the
// second-level cache: the first level has too few requests in flight to keep memory busy.
constexpr size_t kAhead = 8192;
inline void prefetch(const char* p) { __builtin_prefetch(p + kAhead, 0, 2); }
inline void prefetch_tiles(const char* p) {
    for (size_t line = 0; line < kRegisterTiles * kRegisterTileBytes; line += 64) prefetch(p + line);
}
// A quarter of a prefetch, between loads: all of it at once would fill the line buffers that the loads need.
template <bool Ask>
inline void prefetch_quarter(const char* p, int quarter) {
    constexpr size_t bytes = kRegisterTiles * kRegisterTileBytes / 4;
    if (Ask)
        for (size_t line = 0; line < bytes; line += 64) prefetch(p + quarter * bytes + line);
}

template <int N, bool Ask>
void float32(const float* x, size_t stride, const char* weights, size_t inputs, float* out) {
    Vec acc[N][kRegisterTiles] = {};
    for (size_t k = 0; k < inputs; k++, weights += kTileOutputs * 4) {
        if (Ask) UNROLL for (int t = 0; t < kRegisterTiles; t++) prefetch(weights + t * 64);
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

template <int N, bool Ask>
void bfloat16(const bf16* x, size_t stride, const char* weights, size_t padded, float* out) {
    Vec acc[N][kRegisterTiles] = {};
    for (size_t step = 0; step < padded / 32; step++, weights += kRegisterTiles * kRegisterTileBytes)
        for (int pair = 0; pair < 16; pair++) {
            if (Ask)
                UNROLL for (int t = 0; t < kRegisterTiles; t++) prefetch(weights + t * kRegisterTileBytes + pair * 64);
            UNROLL for (int r = 0; r < N; r++) {
                auto value = Dot<bf16>::broadcast(x + r * stride + step * 32 + pair * 2);
                UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                    auto column = reinterpret_cast<const bf16*>(weights + t * kRegisterTileBytes + pair * 64);
                    acc[r][t] = Dot<bf16>::add(acc[r][t], column, value);
                }
            }
        }
    UNROLL for (int r = 0; r < N; r++)
        UNROLL for (int t = 0; t < kRegisterTiles; t++) store(out + r * kTileOutputs + t * kLanes, acc[r][t]);
}

// Lane i of the result: acc + the products of four bytes of x and the four weights of output i. Integers: exact in any order.
inline IVec add_fours(IVec acc, const int8_t* weights, const uint8_t* x) {
#if defined(__AVX512VNNI__)
    int32_t four;
    std::memcpy(&four, x, 4);
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), _mm512_loadu_si512(weights));
#else
    UVec four = load_as<UVec>(weights);
    for (int i = 0; i < 4; i++) acc += ((IVec)(four << (24 - 8 * i)) >> 24) * int32_t(x[i]);
    return acc;
#endif
}

inline Vec to_float(IVec v) { return __builtin_convertvector(v, Vec); }

// Combines the two halves of the quantized sums: sum(w * x) = scales * (256 * (high - 128 * sum(w)) + low).
inline Vec dequantize(IVec high, IVec low, const Linear& w, int output, float x_scale) {
    IVec sums = load_as<IVec>(w.sums() + output);
    Vec exact = fma(to_float(high - sums * 128), splat(256.0f), to_float(low));
    return exact * load(w.scales() + output) * splat(x_scale);
}

template <int N, bool Ask>
void int8(const uint8_t* high, const uint8_t* low, size_t stride, const float* scale, const Linear& w, int tile, float* out) {
    IVec acc_high[N][kRegisterTiles] = {}, acc_low[N][kRegisterTiles] = {};
    for (size_t step = 0; step < w.padded() / 64; step++) {
        const char* tiles = w.output_tile(tile) + step * kRegisterTiles * kRegisterTileBytes;
        for (int four = 0; four < 16; four++) {
            if (Ask)
                UNROLL for (int t = 0; t < kRegisterTiles; t++) prefetch(tiles + t * kRegisterTileBytes + four * 64);
            UNROLL for (int r = 0; r < N; r++)
                UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                    auto weights = reinterpret_cast<const int8_t*>(tiles + t * kRegisterTileBytes + four * 64);
                    size_t at = r * stride + step * 64 + four * 4;
                    acc_high[r][t] = add_fours(acc_high[r][t], weights, high + at);
                    acc_low[r][t] = add_fours(acc_low[r][t], weights, low + at);
                }
        }
    }
    UNROLL for (int r = 0; r < N; r++)
        UNROLL for (int t = 0; t < kRegisterTiles; t++)
            store(out + r * kTileOutputs + t * kLanes, dequantize(acc_high[r][t], acc_low[r][t], w, tile * kTileOutputs + t * kLanes, scale[r]));
}

#if defined(LLAMA_AMX)
constexpr int kOutBytes = kTileOutputs * 4;  // a row of `out`

// Sums begin at zero, or at the sums of the K slice before this one.

// 16 rows: one register tile of x by the output tile's two.
template <bool Ask>
void amx_bfloat16_16(const bf16* x, size_t stride, const char* weights, size_t padded, float* out, bool first_slice) {
    if (first_slice) {
        _tile_zero(0); _tile_zero(1);
    } else {
        _tile_loadd(0, out, kOutBytes); _tile_loadd(1, out + 16, kOutBytes);
    }
    for (size_t step = 0; step < padded / 32; step++, weights += kRegisterTiles * kRegisterTileBytes) {
        if (Ask) prefetch_tiles(weights);
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
void amx_bfloat16_32(const bf16* x, size_t stride, const char* weights, size_t padded, float* out, bool first_slice) {
    if (first_slice) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, out, kOutBytes); _tile_loadd(1, out + 16, kOutBytes);
        _tile_loadd(2, out + 16 * kTileOutputs, kOutBytes); _tile_loadd(3, out + 16 * kTileOutputs + 16, kOutBytes);
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
    _tile_stored(2, out + 16 * kTileOutputs, kOutBytes); _tile_stored(3, out + 16 * kTileOutputs + 16, kOutBytes);
}

// 16 rows: the output tile's two register tiles by the high and the low bytes of x.
using IntSums = int32_t[2 * kRegisterTiles][16][16];
template <bool Ask>
void amx_int8(const uint8_t* high, const uint8_t* low, size_t stride, const char* weights, size_t padded, IntSums& sums, bool first_slice) {
    if (first_slice) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0], 64); _tile_loadd(1, sums[1], 64); _tile_loadd(2, sums[2], 64); _tile_loadd(3, sums[3], 64);
    }
    for (size_t step = 0; step < padded / 64; step++, weights += kRegisterTiles * kRegisterTileBytes) {
        if (Ask) prefetch_tiles(weights);
        _tile_loadd(4, high + step * 64, stride);
        _tile_loadd(5, low + step * 64, stride);
        _tile_loadd(6, weights, 64);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
        _tile_loadd(7, weights + kRegisterTileBytes, 64);
        _tile_dpbusd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64); _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
}
inline void finish_int8(const IntSums& sums, const float* scale, const Linear& w, int tile, int rows, float* out) {
    for (int r = 0; r < rows; r++)
        UNROLL for (int t = 0; t < kRegisterTiles; t++) {
            IVec h = load_as<IVec>(sums[2 * t][r]), l = load_as<IVec>(sums[2 * t + 1][r]);
            store(out + r * kTileOutputs + t * 16, dequantize(h, l, w, tile * kTileOutputs + t * 16, scale[r]));
        }
}
#endif

// Calls kernel(N, whether to prefetch weights, first of these rows) for N rows at a time, N <= Most, until all are done.
template <int Most, class Kernel>
void by_rows(int rows, bool first, Kernel&& kernel) {
    int r = 0;
    for (; r + Most <= rows; r += Most)
        if (first && r == 0)
            kernel(std::integral_constant<int, Most>(), std::true_type(), r);
        else
            kernel(std::integral_constant<int, Most>(), std::false_type(), r);
    if constexpr (Most > 1)
        if (r < rows) by_rows<Most - 1>(rows - r, first && r == 0, [&](auto n, auto ask, int at) { kernel(n, ask, r + at); });
}

// Sums fill most of the registers: 24 of AVX-512's 32, 12 of AVX2's 16 (two of which hold a Vec).
#if defined(__AVX512F__)
constexpr int kFloatRows = 12, kIntRows = 6;
#else
constexpr int kFloatRows = 3, kIntRows = 1;
#endif

}  // namespace kernels

template <>
inline void Linear::block<float>(const Rows<float>& x, size_t row, int rows, int tile, bool first, float* out) const {
    kernels::by_rows<kernels::kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
        kernels::float32<n, ask>(x[row + r], x.stride, output_tile(tile), inputs_, out + r * kTileOutputs);
    });
}

template <>
inline void Linear::block<bf16>(const Rows<bf16>& x, size_t row, int rows, int tile, bool first, float* out) const {
#if defined(LLAMA_AMX)
    add_k_slice(x, row, rows, tile, first, 0, padded_, out);
#else
    kernels::by_rows<kernels::kFloatRows>(rows, first, [&](auto n, auto ask, int r) {
        kernels::bfloat16<n, ask>(x[row + r], x.stride, output_tile(tile), padded_, out + r * kTileOutputs);
    });
#endif
}

inline void Linear::block(const Quantized& x, size_t row, int rows, int tile, bool first, float* out) const {
#if defined(LLAMA_AMX)
    alignas(64) kernels::IntSums sums[kMaxRows / 16];
    add_k_slice(x, row, rows, tile, first, 0, padded_, sums);
    finish(x, row, rows, tile, sums, out);
#else
    kernels::by_rows<kernels::kIntRows>(rows, first, [&](auto n, auto ask, int r) {
        kernels::int8<n, ask>(x.high[row + r], x.low[row + r], x.high.stride, x.scale() + row + r, *this, tile, out + r * kTileOutputs);
    });
#endif
}

#if defined(LLAMA_AMX)
inline void Linear::add_k_slice(const Rows<bf16>& x, size_t row, int rows, int tile, bool first, size_t from, size_t to, void* sums) const {
    // Whole register tiles: rows beyond `rows` are computed from the memory that follows, and never read.
    auto kernel = rows > 16 ? (first ? kernels::amx_bfloat16_32<true> : kernels::amx_bfloat16_32<false>)
                            : (first ? kernels::amx_bfloat16_16<true> : kernels::amx_bfloat16_16<false>);
    kernel(x[row] + from, x.stride, output_tile(tile) + from * kTileOutputs * sizeof(bf16), to - from, static_cast<float*>(sums), from == 0);
}

inline const float* Linear::finish(const Rows<bf16>&, size_t, int, int, const void* sums, float*) const {
    return static_cast<const float*>(sums);
}

inline void Linear::add_k_slice(const Quantized& x, size_t row, int rows, int tile, bool first, size_t from, size_t to, void* sums) const {
    auto into = static_cast<kernels::IntSums*>(sums);
    for (int r = 0; r < rows; r += 16) {
        auto kernel = first && r == 0 ? kernels::amx_int8<true> : kernels::amx_int8<false>;
        kernel(x.high[row + r] + from, x.low[row + r] + from, x.high.stride, output_tile(tile) + from * kTileOutputs, to - from, into[r / 16], from == 0);
    }
}

inline const float* Linear::finish(const Quantized& x, size_t row, int rows, int tile, const void* sums, float* out) const {
    auto from = static_cast<const kernels::IntSums*>(sums);
    for (int r = 0; r < rows; r += 16)
        kernels::finish_int8(from[r / 16], x.scale() + row + r, *this, tile, std::min(16, rows - r), out + r * kTileOutputs);
    return out;
}
#endif

}  // namespace llama
