// The weight formats that the engine has, by name and by the type of the activations. A format more is one line in each list.
#pragma once

#include <string_view>

#include "weight_formats/bfloat16.hpp"
#include "weight_formats/codings.hpp"
#include "weight_formats/float32.hpp"
#include "weight_formats/int4.hpp"
#include "weight_formats/int4_min.hpp"
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

template <class C>
using Blocks = BlockWeights<bf16, C>;

using WeightFormats = FormatList<                                                                   //
    Float32Weights, BFloat16Weights,                                                                //
    BlockWeights<float, Int8Coding>, Blocks<Int8Coding>,                                            //
    GroupedWeights<Int8GroupsCoding>, Blocks<Int8BlocksCoding>,                                     //
    GroupedWeights<Int4Coding>, Blocks<BlockInt4<Int4Coding>>,                                      //
    GroupedWeights<Int4MinCoding>, Blocks<BlockInt4<Int4MinCoding>>,                                //
    Blocks<Int4By128Coding>, Blocks<Int4ZeroBy128Coding>,                                           //
    Blocks<Q4KCoding>, Blocks<Q5KCoding>, Blocks<Q6KCoding>, Blocks<Q50Coding>, Blocks<Q51Coding>,  //
    Blocks<Iq4NlCoding>, Blocks<Iq4XsCoding>, Blocks<Mxfp4Coding>>;

}  // namespace llama
