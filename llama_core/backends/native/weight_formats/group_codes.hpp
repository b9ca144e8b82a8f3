// How codes of 4 and of 8 bits lie in memory, and how they are read as vectors: what the kernels of grouped weights share.
//
// A step of an output tile: 32 scales of one group of 32 inputs, then 32 minima if the format has them, as float16, then codes
// [2 halves][fours of k][16 outputs][4]. Codes of 4 bits share a byte with the codes of the next four of k: line j of a
// half has four 2 j in its lower bits and four 2 j + 1 in its upper.
#pragma once

#include "../base/half.hpp"
#include "../layers/linear.hpp"

namespace llama {

constexpr int kFours = kGroupInputs / 4;     // of k in a group
constexpr size_t kGroupedSliceInputs = 256;  // of a K slice

// One code more for an output, and the reads of a half's line as codes.
struct ByteCodes {
    static constexpr size_t kHalfBytes = 16 * kGroupInputs;
    static constexpr int kBias = 128;  // added to signed codes to read them as unsigned ones

    static void put(char* half, int lane, int k, int code) { half[k / 4 * 64 + lane * 4 + k % 4] = char(code); }
    // Byte i of lane o: code + kBias of output o and input 4 four + i.
    static UVec four(const char* half, int four) { return load_as<UVec>(half + four * 64) ^ 0x80808080u; }
    static IVec code(const char* half, int k) { return (IVec)(load_as<UVec>(half + k / 4 * 64) << (24 - 8 * (k % 4))) >> 24; }
#if defined(LLAMA_AMX)
    // Pair `pair` of a group: codes of 16 outputs as bfloat16, in the order of GroupQuantized::numbers.
    static UVec pair(const char* half, int pair) {
        const UVec line = load_as<UVec>(half + pair / 2 * 64) << (8 - pair % 2 * 8);
        const Vec lower = to_float((IVec)(line << 16) >> 24);
        const Vec upper = to_float((IVec)line >> 24);
        return (UVec)lower >> 16 | ((UVec)upper & 0xffff0000u);
    }
#endif
};

struct HalfByteCodes {
    static constexpr size_t kHalfBytes = 16 * kGroupInputs / 2;

    static void put(char* half, int lane, int k, int code) {
        uint8_t& byte = reinterpret_cast<uint8_t*>(half)[k / 8 * 64 + lane * 4 + k % 4];
        byte = k % 8 < 4 ? uint8_t((byte & 0xf0) | code) : uint8_t((byte & 0x0f) | code << 4);
    }
    static IVec code(const char* half, int k) {
        return (IVec)(load_as<UVec>(half + k / 8 * 64) >> (8 * (k % 4) + k / 4 % 2 * 4) & 15u);
    }
};

// The places in a step of format F.
template <class F>
struct GroupStep {
    using Codes = typename F::Codes;
    static constexpr size_t kScales = 0, kMinima = kTileOutputs * sizeof(half);
    static constexpr size_t kCodes = kMinima + F::kMinima * kTileOutputs * sizeof(half);
    static constexpr size_t kBytes = kCodes + 2 * Codes::kHalfBytes;
    static constexpr size_t kLines = kBytes / 64;

    static Vec scales(const char* step, int t) { return load(reinterpret_cast<const half*>(step + kScales) + t * kLanes); }
    static Vec minima(const char* step, int t) { return load(reinterpret_cast<const half*>(step + kMinima) + t * kLanes); }
    static const char* codes(const char* step, int t) { return step + kCodes + t * Codes::kHalfBytes; }
};

// The results of one row: acc + (dot * x's scale) * scale, group after group. Every kernel computes them with these operations in
// this order from exact sums of integers, so all kernels give the same bits.
template <class F>
inline Vec add_group(Vec acc, IVec dot, const char* step, int t, float x_scale) {
    return fma(to_float(dot) * splat(x_scale), GroupStep<F>::scales(step, t), acc);
}

// The activations that a call multiplies.
struct GroupRows {
    const int8_t* codes;
    const float* scales;
    const int32_t* sums;
    size_t stride, group_stride;
#if defined(LLAMA_AMX)
    const bf16* numbers;       // [rows / 16][groups][16 rows][32]
    const float* tile_scales;  // [rows / 16][groups][16]
    size_t num_groups;
#endif

    GroupRows(const GroupQuantized& x, size_t row)
        : codes(x.codes[row]), scales(x.scales[row]), sums(x.sums[row]), stride(x.codes.stride), group_stride(x.scales.stride) {
#if defined(LLAMA_AMX)
        numbers = x.numbers_of(row, 0);
        tile_scales = x.tile_scales.as<float>() + x.place(row, 0);
        num_groups = x.num_groups;
#endif
    }
    const int8_t* group(int row, size_t g) const { return codes + row * stride + g * kGroupInputs; }
    float scale(int row, size_t g) const { return scales[row * group_stride + g]; }
    int32_t sum(int row, size_t g) const { return sums[row * group_stride + g]; }
};

}  // namespace llama
