// How the codes of grouped weights lie in memory, and how they are read as vectors.
//
// A step of an output tile: 32 scales of one group of 32 inputs, then 32 minima if the format has them, as float16, then codes
// [2 halves][fours of k][16 outputs][4]. Codes of 4 bits share a byte with the codes of the next four of k: line j of a
// half has four 2 j in its lower bits and four 2 j + 1 in its upper.
#pragma once

#include "../base/half.hpp"
#include "../layers/linear.hpp"

namespace llama {

constexpr size_t kGroupedSliceInputs = 256;  // of a K slice

// One code more for an output, and the reads of a half's line as codes.
struct ByteCodes {
    static constexpr size_t kHalfBytes = 16 * kGroupInputs;

    static void put(char* half, int lane, int k, int code) { half[k / 4 * 64 + lane * 4 + k % 4] = char(code); }
    static IVec code(const char* half, int k) { return (IVec)(load_as<UVec>(half + k / 4 * 64) << (24 - 8 * (k % 4))) >> 24; }
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

}  // namespace llama
