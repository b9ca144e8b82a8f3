// The codings of blocks (block_codings.hpp), by the names that Python asks for. model/weight_formats.py describes each.
#pragma once

#include "block_products.hpp"
#include "grouped.hpp"

namespace llama {

// Numbers of 8 bits, with a step for each block; of `int8`, one for each output.
struct Int8BlocksCoding {
    static constexpr char kName[] = "int8_groups";
    static constexpr int kBits = 8, kGroup = 32;
    static constexpr bool kZeros = false, kOneStep = false;
    static constexpr Scales kScales = Scales::kWide;
};
struct Int8Coding : Int8BlocksCoding {
    static constexpr char kName[] = "int8";
    static constexpr bool kOneStep = true;
};

template <int Bits, int Group, Scales kind, bool zeros>
struct CodesOf {
    static constexpr int kBits = Bits, kGroup = Group, kMiddle = 1 << (Bits - 1);
    static constexpr Scales kScales = kind;
    static constexpr bool kZeros = zeros;
    static constexpr const int8_t* kTable = nullptr;
};

template <class C>
struct BlockInt4 : CodesOf<4, 32, Scales::kWide, C::kMinima> {
    static constexpr const auto& kName = C::kName;
    static void encode(const float* values, int count, int* codes, double& scale, double& minimum) {
        CodedGroup group{};
        C::encode(values, count, group);
        std::copy(group.codes, group.codes + count, codes);
        scale = widen(group.scale);
        minimum = C::kMinima ? widen(group.minimum) : -C::kOffset * scale;
    }
};

struct Int4By128Coding : CodesOf<4, 128, Scales::kWide, false> {
    static constexpr char kName[] = "int4_128";
};
struct Int4ZeroBy128Coding : CodesOf<4, 128, Scales::kWide, true> {
    static constexpr char kName[] = "int4_zero_128";
};
struct Q4KCoding : CodesOf<4, 32, Scales::kShort, true> {
    static constexpr char kName[] = "q4_k";
};
struct Q5KCoding : CodesOf<5, 32, Scales::kShort, true> {
    static constexpr char kName[] = "q5_k";
};
struct Q6KCoding : CodesOf<6, 16, Scales::kShort, false> {
    static constexpr char kName[] = "q6_k";
};
struct Q50Coding : CodesOf<5, 32, Scales::kWide, false> {
    static constexpr char kName[] = "q5_0";
};
struct Q51Coding : CodesOf<5, 32, Scales::kWide, true> {
    static constexpr char kName[] = "q5_1";
};

// The numbers of llama.cpp's kvalues_iq4nl.
inline constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
struct Iq4NlCoding : CodesOf<4, 32, Scales::kWide, false> {
    static constexpr char kName[] = "iq4_nl";
    static constexpr const int8_t* kTable = kIq4Numbers;
    static constexpr int kMiddle = 0;
};
struct Iq4XsCoding : CodesOf<4, 32, Scales::kShort, false> {
    static constexpr char kName[] = "iq4_xs";
    static constexpr const int8_t* kTable = kIq4Numbers;
    static constexpr int kMiddle = 0;
};

// Twice the values of FP4 E2M1 (OCP Microscaling Formats, table 5).
inline constexpr int8_t kFp4Numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
struct Mxfp4Coding : CodesOf<4, 32, Scales::kWide, false> {
    static constexpr char kName[] = "mxfp4";
    static constexpr const int8_t* kTable = kFp4Numbers;
    static constexpr int kMiddle = 0;
};

}  // namespace llama
