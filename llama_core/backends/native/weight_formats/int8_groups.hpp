// int8 weights with one float16 scale for each group of 32 inputs, as llama.cpp's Q8_0 has them: scale = max|w| / 127.
#pragma once

#include "grouped.hpp"

namespace llama {

struct Int8GroupsCoding {
    static constexpr char kName[] = "int8_groups";
    using Codes = ByteCodes;
    static constexpr bool kMinima = false;
    static constexpr int kOffset = 0;

    static int stored_code(uint8_t byte) { return int8_t(byte); }

    template <class Group>
    static void encode(const float* values, int count, Group& group) {
        float most = 0;
        for (int i = 0; i < count; i++) most = std::max(most, std::fabs(values[i]));
        const float scale = most / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        for (int i = 0; i < count; i++) group.codes[i] = std::clamp(int(std::round(values[i] * inverse)), -127, 127);
        group.scale = to_half(scale);
    }
};

}  // namespace llama
