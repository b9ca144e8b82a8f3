// Weights in groups of 32 inputs with a scale, and in some formats a minimum, for each group, by float32 activations: what
// int8_groups, int4 and int4_min share there. group_codes.hpp has their layout. Kernels expand the weights in registers.
//
// A coding C has the static members kName, Codes, kMinima (whether groups have minima), kOffset (without minima, weight = scale *
// (code - kOffset)), stored_code (of GroupedRow) and encode (the codes of a group).
#pragma once

#include "group_codes.hpp"
#include "group_floats.hpp"

namespace llama {

// One group of an output, on its way to memory.
struct CodedGroup {
    int codes[kGroupInputs];
    half scale, minimum{};
};

template <class C>
struct GroupedWeights : C {
    using Activation = float;
    using Codes = typename C::Codes;
    using Step = GroupStep<C>;
    static constexpr WeightLayout kLayout{.step_inputs = kGroupInputs, .step_bytes = Step::kBytes};
    static constexpr size_t kSliceInputs = kGroupedSliceInputs;
    static constexpr InputForm kInputForm = InputForm::kDense;
    static constexpr int kMaxInputs = INT_MAX, kGroup = kGroupInputs;
    static constexpr std::nullptr_t add_k_slice = nullptr, finish = nullptr, expand = nullptr;

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        float values[kGroupInputs];
        for (int k = 0; k < w.inputs(); k += kGroupInputs) {
            const int count = std::min(kGroupInputs, w.inputs() - k);
            for (int i = 0; i < count; i++) values[i] = widen(source[k + i]);
            CodedGroup group{};
            C::encode(values, count, group);
            put(w, output, k / kGroupInputs, group);
        }
    }

    static void pack_groups(const PackedWeights& w, const GroupedRow& source, int output) {
        for (int g = 0; g < w.inputs() / kGroupInputs; g++) {
            CodedGroup group{};
            for (int i = 0; i < kGroupInputs; i++) group.codes[i] = C::stored_code(source.codes[g * kGroupInputs + i]);
            group.scale = to_half(source.scales[g]);
            if (C::kMinima) group.minimum = to_half(source.minima[g]);
            put(w, output, g, group);
        }
    }

    static void multiply(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, bool first,
                         float* out) {
        kernels::multiply_expanded<C>(w, x, row, rows, tile, first, out);
    }

    static void multiply_streams(const PackedWeights& w, const Inputs<float>& x, size_t row, int rows, int tile, int distance,
                                 float* out) {
        kernels::multiply_expanded_streams<C>(w, x, row, rows, tile, distance, out);
    }

  private:
    static void put(const PackedWeights& w, int output, int g, const CodedGroup& group) {
        char* step = w.output_tile(output / kTileOutputs) + g * Step::kBytes;
        const int place = output % kTileOutputs;
        char* codes = step + Step::kCodes + place / 16 * Codes::kHalfBytes;
        for (int k = 0; k < kGroupInputs; k++) Codes::put(codes, place % 16, k, group.codes[k]);
        reinterpret_cast<half*>(step + Step::kScales)[place] = group.scale;
        if (C::kMinima) reinterpret_cast<half*>(step + Step::kMinima)[place] = group.minimum;
    }
};

}  // namespace llama
