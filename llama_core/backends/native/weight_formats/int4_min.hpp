// 4-bit weights with a float16 scale and minimum for each group of 32 inputs, as llama.cpp's Q4_1 has them: weight = scale * code +
// minimum.
#pragma once

#include "grouped.hpp"

namespace llama {

struct Int4MinCoding {
    static constexpr char kName[] = "int4_min";
    using Codes = HalfByteCodes;
    static constexpr bool kMinima = true;
    static constexpr int kOffset = 0;

    static int stored_code(uint8_t byte) { return byte & 15; }

    template <class Group>
    static void encode(const float* values, int count, Group& group) {
        const float least = *std::min_element(values, values + count), most = *std::max_element(values, values + count);
        const float scale = (most - least) / 15.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        for (int i = 0; i < count; i++) group.codes[i] = std::clamp(int((values[i] - least) * inverse + 0.5f), 0, 15);
        group.scale = to_half(scale);
        group.minimum = to_half(least);
    }
};

}  // namespace llama
