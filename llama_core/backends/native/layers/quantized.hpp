// Activations as integers, for weight formats that multiply integers.
#pragma once

#include "../base/amx_tiles.hpp"
#include "../base/memory.hpp"
#include "../base/simd.hpp"

namespace llama {

// What a weight format multiplies: the activations themselves, or one of two forms of integers.
enum class InputForm { kDense, kRows, kGroups };

constexpr int kGroupInputs = 32;  // inputs that share a scale in the formats of groups

// Activations as 16-bit integers with one scale for each row: x = scale * code, codes from -32767 to 32767. A code is stored in two
// forms: as two bytes, code = 256 * (high - 128) + low, and as one number for kernels of vectors. Where there are tile registers,
// only kFewRows rows have numbers: vectors take no longer for so few.
struct Quantized {
    static constexpr size_t kFewRows = 8;
#if defined(LLAMA_AMX)
    static constexpr size_t kMostNumberRows = kFewRows;
#else
    static constexpr size_t kMostNumberRows = SIZE_MAX;
#endif
    static constexpr size_t kStep = 64;  // inputs of a register tile
    static constexpr size_t kTileBytes = 16 * kStep,
                            kStepBytes = 2 * kTileBytes;  // of a register tile, of one for high and low

    Memory tiles;                // [rows / 16][inputs / 64][high, low][16 rows][64]: a register tile is one run of memory
    Activations<int16_t> pairs;  // inputs 0 and 2, then 1 and 3 of each four
    Activations<int16_t> sums;   // of the codes of kGroupInputs inputs, in two parts: sum = 32 * first + second
    Memory scales;               // float [rows]
    size_t steps = 0;

    Quantized() = default;
    Quantized(size_t rows, size_t width)
        : tiles(round_up(rows, kMaxRows) * round_up(width, kStep) * 2),
          pairs(std::min(rows, kMostNumberRows), round_up(width, kStep)),
          sums(std::min(rows, kMostNumberRows), round_up(width, kStep) / kGroupInputs * 2),
          scales(round_up(rows, kMaxRows) * sizeof(float)),
          steps(round_up(width, kStep) / kStep) {}
    float* scale() const { return scales.as<float>(); }
    size_t bytes() const { return tiles.bytes() + pairs.bytes() + sums.bytes() + scales.bytes(); }
    // The high bytes of a row's inputs 64 step .. 64 step + 63. Their low bytes are kTileBytes further.
    uint8_t* high(size_t row, size_t step) const {
        return tiles.as<uint8_t>() + (row / 16 * steps + step) * kStepBytes + row % 16 * kStep;
    }

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
        for (int i = 0; i < end; i += kGroupInputs) {
            IVec total{};
            for (int at = i; at < i + kGroupInputs; at += kLanes) {
                const IVec code = at < width ? (IVec)fma(load(x + at), splat(inverse), magic) - (IVec)magic : IVec{};
                put_bytes(row, at, code);
                if (rows > kMostNumberRows) continue;
                put_number(row, at, code);
                total += code;
            }
            if (rows > kMostNumberRows) continue;
            const int32_t sum = fold(total, [](auto a, auto b) { return a + b; });
            int16_t* parts = sums[row] + i / kGroupInputs * 2;
            parts[0] = int16_t(sum >> 5), parts[1] = int16_t(sum & 31);
        }
    }

  private:
    static constexpr float kLeast =
        1e-33f;  // rows of smaller values become zeros: the inverse of their scale could be infinite

    void put_bytes(size_t row, int at, IVec code) {
        uint8_t* to = high(row, at / kStep) + at % kStep;
        store_low(reinterpret_cast<int8_t*>(to), (code >> 8) + 128);
        store_low(reinterpret_cast<int8_t*>(to + kTileBytes), code);
    }
    void put_number(size_t row, int at, IVec code) { store_low(pairs[row] + at, swap_middles(code)); }
};

// Activations as 8-bit integers with one scale for each group of inputs: x = scale * code, codes from -127 to 127.
struct GroupQuantized {
    Activations<int8_t> codes;
    Activations<float> scales;
    Activations<int32_t> sums;  // of the codes of a group
#if defined(LLAMA_AMX)
    Memory
        numbers;  // bf16 [rows / 16][groups][16 rows][32]: the codes, which tile registers multiply exactly, as `put` orders them
    Memory tile_scales;  // float [rows / 16][groups][16]: those above, for register tiles
    size_t num_groups = 0;
#endif
    GroupQuantized() = default;
    GroupQuantized(size_t rows, size_t width) : codes(rows, width), scales(rows, groups(width)), sums(rows, groups(width)) {
#if defined(LLAMA_AMX)
        numbers = Memory(round_up(rows, kMaxRows) * groups(width) * kGroupInputs * sizeof(bf16));
        num_groups = groups(width);
        tile_scales = Memory(round_up(rows, kMaxRows) * num_groups * sizeof(float));
#endif
    }
    size_t bytes() const {
        size_t total = codes.bytes() + scales.bytes() + sums.bytes();
#if defined(LLAMA_AMX)
        total += numbers.bytes() + tile_scales.bytes();
#endif
        return total;
    }

#if defined(LLAMA_AMX)
    // 16 rows of a group lie together, so a register tile of them is one run of memory.
    size_t place(size_t row, size_t group) const { return (row / 16 * num_groups + group) * 16 + row % 16; }
    bf16* numbers_of(size_t row, size_t group) const { return numbers.as<bf16>() + place(row, group) * kGroupInputs; }
#endif

    // `width`: a multiple of 16.
    template <class T>
    void quantize(const T* x, size_t row, int width) {
        for (int at = 0, group = 0; at < width; at += kGroupInputs, group++) {
            const bool whole = at + kLanes < width;
            const Vec low = load(x + at), high = whole ? load(x + at + kLanes) : Vec{};
            const UVec a = (UVec)low & 0x7fffffff, b = (UVec)high & 0x7fffffff;
            // Absolute values compare as their bits do, and NaN and infinity are above all others.
            const uint32_t most = fold(select(a > b, a, b), [](auto p, auto q) { return select(p > q, p, q); });
            float limit;
            std::memcpy(&limit, &most, 4);
            const bool multiplies = limit < kMultiplies;  // false for NaN too
            const float scale = multiplies ? limit / 127.0f : NAN;
            const float inverse = multiplies && limit > 1e-35f ? 127.0f / limit : 0.0f;
            const IVec p = rounded_to_integers(low, inverse), q = rounded_to_integers(high, inverse);
            put(row, at, p);
            if (whole) put(row, at + kLanes, q);
            const int32_t sum = fold(p + q, [](auto u, auto v) { return u + v; });
            scales[row][group] = scale;
            sums[row][group] = sum;
#if defined(LLAMA_AMX)
            tile_scales.as<float>()[place(row, group)] = scale;
#endif
        }
    }

  private:
    // Products of larger activations by weights could exceed float32. Such a group becomes NaN, as one of infinities does.
    static constexpr float kMultiplies = 1e30f;

    static size_t groups(size_t width) { return (width + kGroupInputs - 1) / kGroupInputs; }

    static IVec rounded_to_integers(Vec v, float inverse) {
        const Vec magic = splat(12582912.0f);
        return inverse > 0 ? (IVec)fma(v, splat(inverse), magic) - (IVec)magic : IVec{};
    }

    void put(size_t row, int at, IVec v) {
        store_low(codes[row] + at, v);
#if defined(LLAMA_AMX)
        // Inputs 0 and 2, 1 and 3 of each four are neighbours, as the codes of weights are when bytes become 16-bit numbers.
        const IVec pairs = swap_middles(v);
        store(numbers_of(row, at / kGroupInputs) + at % kGroupInputs, to_float(pairs));
#endif
    }
};

}  // namespace llama
