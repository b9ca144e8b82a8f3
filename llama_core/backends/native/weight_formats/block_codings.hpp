// Weights on a grid of 8 bits: a weight is a whole number from -127 to 127 of steps, and a block of 256 inputs of an output shares a
// step. This header has the codes of a block in memory, and reads them as whole numbers.
//
// weight = step * round((code - zero) * factor / 128). A group of inputs shares `factor`, and in some codings `zero`; a code of 8 bits
// is the whole number itself. Each weight is rounded by itself: a zero that were rounded would shift all weights of a group alike.
//
// A coding C has the static members
//   kName
//   kBits      of a code: 4, 5, 6 or 8
//   kGroup     inputs that share a factor: 16, 32 or 128
//   kScales    kWide: a factor is a number of 16 bits; kShort: a number of 6 bits by a `unit` that the block shares, or of 8 bits by
//              128ths of one where groups have no zeros, as k-quants have them
//   kZeros     whether groups have zeros; else kMiddle is the zero of all
//   kTable     numbers of 8 bits that the codes stand for, or null
//
// An output tile is a sequence of blocks; the last may have fewer steps of 64 inputs. A block: float steps of 32 outputs, int16 units
// [32] (kShort), groups of more than 64 inputs, then its steps. A step: its groups, then for each half of 16 outputs the codes
// [inputs / 8][16 outputs][4]: byte i of a line has the codes of inputs i and 4 + i. Then come the upper bits of codes, 16 bits of an
// output and two inputs in a lane of 16 bits, or for 8 bits the codes [inputs / 4][16 outputs][4] alone.
// A group of 32 outputs: int16 factors, then int16 zeros in 256ths; or uint16 zero * 64 + factor (kShort, kZeros). Groups of kShort
// without zeros lie together, [16 outputs][groups of the step] int8 for each half.
#pragma once

#include "../base/half.hpp"
#include "../layers/linear.hpp"

namespace llama {

enum class Scales { kWide, kShort };

constexpr size_t kBlockInputs = 256, kStepInputs = 64;

template <class C>
struct BlockLayout {
    static constexpr bool kHasGroups = C::kBits < 8, kIsShort = kHasGroups && C::kScales == Scales::kShort;
    static constexpr bool kBytesAlone = kIsShort && !C::kZeros;  // groups of one byte for each output
    static constexpr size_t kGroupBytes = !kHasGroups   ? 0
                                          : kBytesAlone ? kTileOutputs
                                                        : kTileOutputs * (kIsShort || !C::kZeros ? 2 : 4);
    static constexpr bool kHeadGroups = C::kGroup > int(kStepInputs);
    static constexpr size_t kUnits = kTileOutputs * sizeof(float);
    static constexpr size_t kGroups = kUnits + kIsShort * kTileOutputs * sizeof(int16_t);
    static constexpr size_t kHeadBytes = kGroups + kHeadGroups * (kBlockInputs / C::kGroup) * kGroupBytes;
    static constexpr size_t kCodes = kHeadGroups ? 0 : kStepInputs / C::kGroup * kGroupBytes;
    static constexpr size_t kPlanes = 16 * kStepInputs / 2;  // in a half
    static constexpr size_t kHalfBytes = 16 * kStepInputs * C::kBits / 8;
    static constexpr size_t kStepBytes = kCodes + 2 * kHalfBytes;
    static constexpr size_t kBlockBytes = kHeadBytes + kBlockInputs / kStepInputs * kStepBytes;
    static constexpr int kCombos = C::kBits > 4 && C::kBits < 8 ? 16 / (C::kBits - 4) : 16;  // upper bits in 16 bits

    // Where a group's parameters lie in a block.
    static constexpr size_t group(int group) {
        if (kHeadGroups) return kGroups + group * kGroupBytes;
        const int of_step = kStepInputs / C::kGroup, step = group / of_step;
        return kHeadBytes + step * kStepBytes + group % of_step * kGroupBytes;
    }
    static constexpr size_t half(int step, int t) { return kHeadBytes + step * kStepBytes + kCodes + t * kHalfBytes; }
};

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

// The numbers of `table` for codes in bits 8 to 11 of each 16-bit lane, in the lane's upper byte.
inline UVec look_up(const int8_t* table, UVec codes) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (UVec)_mm512_shuffle_epi8(all, (__m512i)(codes | 0x00800080u));
#elif LLAMA_REGISTER_BYTES == 32  // AVX2
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return by_registers(codes, codes, [=](Register<uint32_t> x, Register<uint32_t>) {
        return (Register<uint32_t>)_mm256_shuffle_epi8(all, (__m256i)(x | 0x00800080u));
    });
#else
    alignas(64) uint8_t bytes[64];
    store_as(bytes, codes);
    for (int i = 0; i < 64; i += 2) bytes[i + 1] = uint8_t(table[bytes[i + 1]]);
    return load_as<UVec>(bytes);
#endif
}

// 16-bit numbers of 16 outputs, each twice.
inline UVec twice(const char* numbers) {
#if defined(__AVX512F__)
    const UVec wide = (UVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
#else
    const UVec wide = load_wide<UVec>(numbers);
#endif
    return wide | wide << 16;
}

// What 16 outputs need to read the codes of one group.
template <class C>
struct Group {
    using Layout = BlockLayout<C>;
    UVec factors, zeros;

    Group() = default;
    // `at`: of the group's parameters. `index`: of the group in its step. units: of the block, each twice.
    Group(const char* at, int index, int t, UVec units) {
        if constexpr (!Layout::kHasGroups) return;
        if constexpr (Layout::kBytesAlone) {
            constexpr int kCount = kStepInputs / C::kGroup;  // bytes of an output
            static_assert(kCount == 2 || kCount == 4);
            const char* bytes = at + t * 16 * kCount;
            const UVec all = kCount == 4 ? load_as<UVec>(bytes) : load_wide<UVec>(bytes);
            const UVec upper = all << (24 - 8 * index) & 0xff000000u;
            factors = multiply_high_rounded(upper | upper >> 16, units);
        } else if constexpr (Layout::kIsShort) {
            const UVec both = twice(at + t * 32);
            factors = (UVec)((Halves)(both & 0x003f003fu) * (Halves)units);
            zeros = both >> (C::kBits == 4 ? 3 : 2) & (C::kBits == 4 ? 0x1ff81ff8u : 0x3ff03ff0u);
        } else {
            factors = twice(at + t * 32);
            if constexpr (C::kZeros) zeros = twice(at + kTileOutputs * 2 + t * 32);
        }
    }

    // Whole numbers of 16 outputs for inputs 8 line + (0 and 2, 1 and 3, 4 and 6, 5 and 7: kPair) of a step.
    template <int kPair>
    [[gnu::always_inline]] UVec weights(const char* half, int line) const {
        if constexpr (C::kBits == 8) {
            const char* bytes = half + line * 128 + kPair / 2 * 64;
            if constexpr (kPair % 2 == 0) return (UVec)((Shorts)(load_as<UVec>(bytes) << 8) >> 8);
            return (UVec)((Shorts)load_as<UVec>(bytes) >> 8);
        } else {
            const char* bytes = half + line * 64;
            UVec codes;
            if constexpr (kPair == 0) codes = load_as<UVec>(bytes - 1) & 0x0f000f00u;  // takes the place of a shift
            if constexpr (kPair == 1) codes = load_as<UVec>(bytes) & 0x0f000f00u;
            if constexpr (kPair == 2) codes = load_as<UVec>(bytes) << 4 & 0x0f000f00u;
            if constexpr (kPair == 3) codes = load_as<UVec>(bytes) >> 4 & 0x0f000f00u;
            if constexpr (C::kBits > 4) {
                constexpr int kUpper = C::kBits - 4, kLines = Layout::kCombos / 4;
                const UVec plane = load_as<UVec>(half + Layout::kPlanes + line / kLines * 64);
                const int bit = (line % kLines * 4 + kPair) * kUpper;
                codes |= (bit < 12 ? plane << (12 - bit) : plane >> (bit - 12)) & (kUpper == 1 ? 0x10001000u : 0x30003000u);
            }
            if constexpr (C::kTable != nullptr)
                codes = look_up(C::kTable, codes);
            else if constexpr (C::kZeros)
                codes = (UVec)((Halves)codes - (Halves)zeros);
            else
                codes = (UVec)((Halves)codes - (Halves)(UVec{} + C::kMiddle * 256 * 0x10001u));
            return multiply_high_rounded(codes, factors);
        }
    }
};

}  // namespace kernels
}  // namespace llama
