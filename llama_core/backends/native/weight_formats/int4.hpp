// 4-bit weights with one float16 scale for each group of 32 inputs, as llama.cpp's Q4_0 has them: weight = scale * (code - 8).
#pragma once

#include "grouped.hpp"

namespace llama {

struct Int4Coding {
    static constexpr char kName[] = "int4";
    using Codes = HalfByteCodes;
    static constexpr bool kMinima = false;
    static constexpr int kOffset = 8;

    static int stored_code(uint8_t byte) { return byte & 15; }

    // The value of the largest magnitude gets code 0, with its sign in the scale.
    template <class Group>
    static void encode(const float* values, int count, Group& group) {
        float extreme = 0;
        for (int i = 0; i < count; i++)
            if (std::fabs(values[i]) > std::fabs(extreme)) extreme = values[i];
        const float scale = extreme / -8.0f, inverse = scale != 0 ? 1.0f / scale : 0.0f;
        for (int i = 0; i < kGroupInputs; i++)
            group.codes[i] = i < count ? std::clamp(int(values[i] * inverse + 8.5f), 0, 15) : kOffset;
        group.scale = to_half(scale);
    }
};

}  // namespace llama
