// Activations as integers, for weight formats that multiply integers.
#pragma once

#include "amx_tiles.hpp"
#include "memory.hpp"
#include "simd.hpp"

namespace llama {

typedef uint8_t BVec __attribute__((vector_size(16)));
typedef int8_t SBVec __attribute__((vector_size(16)));

// What a weight format multiplies: the activations themselves, or one of two forms of integers.
enum class InputForm { kDense, kRows, kGroups };

constexpr int kGroupInputs = 32;  // inputs that share a scale in the formats of groups

// Activations as 16-bit integers in two bytes: x = scale * (256 * (high - 128) + low).
struct Quantized {
    Activations<uint8_t> high, low;
    Memory scales;  // float [rows]
    Quantized() = default;
    Quantized(size_t rows, size_t width) : high(rows, width), low(rows, width), scales(round_up(rows, kMaxRows) * 4) {}
    float* scale() const { return scales.as<float>(); }
    size_t bytes() const { return high.bytes() + low.bytes() + scales.bytes(); }

    template <class T>
    void quantize(const T* x, size_t row, int width) {
        Vec most = Vec{}, check = Vec{};
        for (int i = 0; i < width; i += kLanes) {
            Vec v = load(x + i);
            most = max(most, v < Vec{} ? -v : v);
            check += v * splat(0.0f);  // NaN for infinity and for NaN, which integers cannot hold
        }
        float limit = max(most);
        float inverse = limit > 0 ? 32767.0f / limit : 0.0f;
        scale()[row] = limit / 32767.0f + sum(check);
        const Vec magic = splat(12582912.0f);
        for (int i = 0; i < width; i += kLanes) {
            IVec q = (IVec)(fma(load(x + i), splat(inverse), magic)) - (IVec)magic + 32768;
            BVec h = __builtin_convertvector(q >> 8, BVec), l = __builtin_convertvector(q, BVec);
            std::memcpy(high[row] + i, &h, sizeof h);
            std::memcpy(low[row] + i, &l, sizeof l);
        }
    }
};

// Activations as 8-bit integers with one scale for each group of inputs: x = scale * code, codes from -127 to 127.
struct GroupQuantized {
    Activations<int8_t> codes;
    Activations<float> scales;
    Activations<int32_t> sums;       // of the codes of a group
    Activations<float> scaled_sums;  // scale * sum
#if defined(LLAMA_AMX)
    Memory
        numbers;  // bf16 [rows / 16][groups][16 rows][32]: the codes, which tile registers multiply exactly, as `put` orders them
    Memory tile_scales, tile_scaled_sums;  // float [rows / 16][groups][16]: those above, for register tiles
    size_t num_groups = 0;
#endif
    GroupQuantized() = default;
    GroupQuantized(size_t rows, size_t width)
        : codes(rows, width), scales(rows, groups(width)), sums(rows, groups(width)), scaled_sums(rows, groups(width)) {
#if defined(LLAMA_AMX)
        numbers = Memory(round_up(rows, kMaxRows) * groups(width) * kGroupInputs * sizeof(bf16));
        num_groups = groups(width);
        tile_scales = Memory(round_up(rows, kMaxRows) * num_groups * sizeof(float));
        tile_scaled_sums = Memory(round_up(rows, kMaxRows) * num_groups * sizeof(float));
#endif
    }
    size_t bytes() const {
        size_t total = codes.bytes() + scales.bytes() + sums.bytes() + scaled_sums.bytes();
#if defined(LLAMA_AMX)
        total += numbers.bytes() + tile_scales.bytes() + tile_scaled_sums.bytes();
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
            const uint32_t most = fold((UVec)(a > b ? a : b), [](UVec p, UVec q) { return (UVec)(p > q ? p : q); });
            float limit;
            std::memcpy(&limit, &most, 4);
            const bool multiplies = limit < kMultiplies;  // false for NaN too
            const float scale = multiplies ? limit / 127.0f : NAN;
            const float inverse = multiplies && limit > 1e-35f ? 127.0f / limit : 0.0f;
            const IVec p = rounded_to_integers(low, inverse), q = rounded_to_integers(high, inverse);
            put(row, at, p);
            if (whole) put(row, at + kLanes, q);
            const int32_t sum = fold(p + q, [](IVec u, IVec v) { return u + v; });
            scales[row][group] = scale;
            sums[row][group] = sum;
            scaled_sums[row][group] = scale * float(sum);
#if defined(LLAMA_AMX)
            tile_scales.as<float>()[place(row, group)] = scale;
            tile_scaled_sums.as<float>()[place(row, group)] = scale * float(sum);
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
        const SBVec narrow = __builtin_convertvector(v, SBVec);
        std::memcpy(codes[row] + at, &narrow, sizeof narrow);
#if defined(LLAMA_AMX)
        // Inputs 0 and 2, 1 and 3 of each four are neighbours, as the codes of weights are when bytes become 16-bit numbers.
        const IVec pairs = __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        store(numbers_of(row, at / kGroupInputs) + at % kGroupInputs, __builtin_convertvector(pairs, Vec));
#endif
    }
};

}  // namespace llama
