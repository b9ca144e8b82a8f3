// The weight formats that the engine has, by name and by the type of the activations. A format more is one line in each list.
#pragma once

#include <string_view>

#include "weight_formats/bfloat16.hpp"
#include "weight_formats/float32.hpp"
#include "weight_formats/int4.hpp"
#include "weight_formats/int4_min.hpp"
#include "weight_formats/int8.hpp"
#include "weight_formats/int8_groups.hpp"

namespace llama {

template <class... Formats>
struct FormatList {
    // The format `name` for activations T; null if there is none.
    template <class T>
    static const WeightFormat<T>* find(std::string_view name) {
        const WeightFormat<T>* found = nullptr;
        (match<T, Formats>(name, found), ...);
        return found;
    }

  private:
    template <class T, class F>
    static void match(std::string_view name, const WeightFormat<T>*& found) {
        if constexpr (std::is_same_v<T, typename F::Activation>)
            if (name == F::kName) found = &kFormatOf<F>;
    }
};

using WeightFormats = FormatList<                       //
    Float32Weights,                                     //
    BFloat16Weights,                                    //
    Int8Weights<float>, Int8Weights<bf16>,              //
    Int8GroupsWeights<float>, Int8GroupsWeights<bf16>,  //
    Int4Weights<float>, Int4Weights<bf16>,              //
    Int4MinWeights<float>, Int4MinWeights<bf16>>;

}  // namespace llama
