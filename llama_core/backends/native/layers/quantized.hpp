// Activations as integers, for weight formats that multiply integers.
#pragma once

#include "../base/amx_tiles.hpp"
#include "../base/memory.hpp"
#include "../base/simd.hpp"

namespace llama {

// What a weight format multiplies: the activations themselves, or integers with a scale for each row.
enum class InputForm { kDense, kRows };

constexpr int kGroupInputs = 32;  // inputs that share a scale in the formats of groups

// Activations as 16-bit integers with one scale for each row: x = scale * code, codes from -32767 to 32767. Kernels of vectors read
// the codes, tile registers read them as two bytes, code = 256 * high + low, of which low has no sign. Where there are tile
// registers, only kFewRows rows have codes: vectors take no longer for so few.
struct Quantized {
    static constexpr size_t kFewRows = 4;
    static constexpr size_t kStep = 64;  // inputs of a register tile
#if defined(LLAMA_AMX)
    static constexpr size_t kMostNumberRows = kFewRows;
    static constexpr size_t kTileBytes = 16 * kStep,
                            kStepBytes = 2 * kTileBytes;  // of a register tile, of one for high and low
    Memory tiles;  // [rows / 16][inputs / 64][high, low][16 rows][64]: a register tile is one run of memory
#else
    static constexpr size_t kMostNumberRows = SIZE_MAX;
#endif
    Activations<int16_t> pairs;  // inputs 0 and 2, then 1 and 3 of each four
    Memory scales;               // float [rows]
    size_t steps = 0, num_pairs = 0;

    // `in_parts`: the rows are those of several products, which may have few rows each.
    Quantized() = default;
    Quantized(size_t rows, size_t width, bool in_parts)
        : pairs(in_parts ? rows : std::min(rows, kMostNumberRows), round_up(width, kStep)),
          scales(round_up(rows, kMaxRows) * sizeof(float)),
          steps(round_up(width, kStep) / kStep),
          num_pairs(in_parts ? rows : std::min(rows, kMostNumberRows)) {
#if defined(LLAMA_AMX)
        tiles = Memory(round_up(rows, kMaxRows) * steps * kStep * 2);
#endif
    }
    float* scale() const { return scales.as<float>(); }
    // Whether these rows of a product have pairs, and few enough that vectors take no longer than tiles.
    bool is_few(size_t row, size_t rows) const { return rows <= kMostNumberRows && row + rows <= num_pairs; }
#if defined(LLAMA_AMX)
    size_t bytes() const { return tiles.bytes() + pairs.bytes() + scales.bytes(); }
    // The high bytes of a row's inputs 64 step .. 64 step + 63. Their low bytes are kTileBytes further.
    uint8_t* high(size_t row, size_t step) const {
        return tiles.as<uint8_t>() + (row / 16 * steps + step) * kStepBytes + row % 16 * kStep;
    }
#else
    size_t bytes() const { return pairs.bytes() + scales.bytes(); }
#endif

    // `width`: a multiple of 16. Inputs beyond it, to a multiple of 64, become zeros. `rows`: of the product.
    template <class T>
    void quantize(const T* x, size_t row, int width, size_t rows) {
        Vec most = Vec{}, check = Vec{};
        for (int i = 0; i < width; i += kLanes) {
            const Vec v = load(x + i);
            most = max((Vec)((UVec)v & 0x7fffffff), most);
            check += v * splat(0.0f);  // NaN for infinity and for NaN, which integers cannot hold
        }
        const float limit = max(most);
        const float inverse = limit > kLeast ? 32767.0f / limit : 0.0f;
        scale()[row] = limit / 32767.0f + sum(check);
        const Vec magic = splat(12582912.0f);
        const int end = int(round_up(width, kStep));
        const bool has_pairs = rows <= kMostNumberRows || num_pairs > kMostNumberRows;
        for (int at = 0; at < end; at += kLanes) {
            const IVec code = at < width ? (IVec)fma(load(x + at), splat(inverse), magic) - (IVec)magic : IVec{};
            put_bytes(row, at, code);
            if (has_pairs) store_low(pairs[row] + at, swap_middles(code));
        }
    }

  private:
    static constexpr float kLeast =
        1e-33f;  // rows of smaller values become zeros: the inverse of their scale could be infinite

    void put_bytes([[maybe_unused]] size_t row, [[maybe_unused]] int at, [[maybe_unused]] IVec code) {
#if defined(LLAMA_AMX)
        uint8_t* to = high(row, at / kStep) + at % kStep;
        store_low(reinterpret_cast<int8_t*>(to), code >> 8);
        store_low(reinterpret_cast<int8_t*>(to + kTileBytes), code);
#endif
    }
};

}  // namespace llama
