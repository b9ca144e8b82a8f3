// The weights of one rank, packed row by row as Python reads them.
#pragma once

#include <vector>

#include "../step_abi.hpp"
#include "linear.hpp"

namespace llama {

// This rank's part of a weight as the checkpoint has it, [outputs][inputs]: dense, or matrices in groups.
struct WeightSource {
    const void* dense = nullptr;
    bool is_bfloat16 = false;  // else float32
    GroupedRow groups{};       // of the first row; codes null if the source is dense
};

// Memory is reserved when the object is made. `begin` names the weight that the following calls of `pack` fill.
template <class T>
class RankWeights {
  public:
    // `formats`: of each tensor, null of those that are no matrices. `operations`: say which tensors are gated.
    RankWeights(const std::vector<Tensor>& tensors, const std::vector<const WeightFormat<T>*>& formats,
                const std::vector<Operation>& operations) {
        std::vector<bool> gated(tensors.size() + 1);
        std::vector<int> experts(tensors.size() + 1, 1), strides(tensors.size() + 1);
        for (size_t i = 0; i < tensors.size(); i++) strides[i + 1] = tensors[i].columns;
        for (const Operation& each : operations) {
            if (each.kind == kGatedLinear || each.kind == kExpertGates) gated[each.tensor] = gated[each.other] = true;
            if (each.kind == kExpertGates || each.kind == kExpertSum) experts[each.tensor] = experts[each.other] = each.experts;
            if (each.kind == kRoute) strides[each.tensor] = round16(strides[each.tensor]);  // it is read in whole vectors
        }
        for (size_t i = 0; i < tensors.size(); i++)
            tensors_.emplace_back(tensors[i], formats[i], gated[i + 1], experts[i + 1], strides[i + 1]);
    }

    const Linear<T>& matrix(int tensor) const { return tensors_[tensor - 1].matrix; }
    // A norm's factors, or the biases of a matrix in the order of its outputs, followed by zeros. T [rows][columns] of an embedding.
    // Null for no tensor.
    T* values(int tensor) const { return tensor ? tensors_[tensor - 1].values.template as<T>() : nullptr; }

    // Of matrices and embeddings.
    size_t bytes() const {
        size_t total = 0;
        for (const Held& held : tensors_) total += held.matrix.bytes() + (held.is.columns > 1 ? held.values.bytes() : 0);
        return total;
    }

    void begin(const WeightPart& part, const WeightSource& source) { part_ = part, source_ = source; }
    int num_tasks() const { return (part_.rows + 15) / 16; }

    void pack(int task) {
        const WeightSource& source = source_;
        const int columns = part_.columns;
        for (int row = task * 16; row < std::min(part_.rows, task * 16 + 16); row++) {
            const size_t at = size_t(row) * columns;
            if (source.groups.codes) {
                const size_t group = at / tensors_[part_.tensor - 1].matrix.format().group_inputs;
                const float* minima = source.groups.minima ? source.groups.minima + group : nullptr;
                pack_row(GroupedRow{source.groups.codes + at, source.groups.scales + group, minima}, row);
            } else if (source.is_bfloat16) {
                pack_row(static_cast<const bf16*>(source.dense) + at, row);
            } else {
                pack_row(static_cast<const float*>(source.dense) + at, row);
            }
        }
    }

  private:
    // The experts of a matrix lie one below the other, each in whole output tiles.
    struct Held {
        Tensor is;
        bool is_gated;
        int rows, padded;  // of an expert; of the matrix if it is no experts'
        int stride;        // of values
        Linear<T> matrix;
        Memory values;

        Held(const Tensor& tensor, const WeightFormat<T>* format, bool gated, int experts, int stride)
            : is(tensor), is_gated(gated), rows(is.rows / experts), stride(stride) {
            padded = gated ? round16(rows / 2) * 2 : rows;
            if (experts > 1) padded = int(round_up(padded, kTileOutputs));
            const int outputs = padded * experts;
            if (format)
                matrix = Linear<T>(*format, outputs, is.columns);
            else
                values = Memory(round_up(outputs, kTileOutputs) * size_t(stride) * sizeof(T));
        }
        // Of the gates' rows and then those of up: 16 outputs are gates, and the same 16 of up follow, and so on.
        int output_of(int row) const {
            const int begin = row / rows * padded, within = row % rows;
            if (!is_gated) return begin + within;
            const int half = rows / 2, is_up = within >= half, at = within - is_up * half;
            return begin + at / 16 * 32 + is_up * 16 + at % 16;
        }
    };

    template <class S>
    void pack_row(const S& source, int row) {
        const Held& to = tensors_[part_.tensor - 1];
        const int output = to.output_of(part_.first + row);
        if (to.matrix.bytes()) return to.matrix.pack(source, output);
        if constexpr (std::is_pointer_v<S>) {
            T* values = to.values.template as<T>() + size_t(output) * to.stride;
            for (int i = 0; i < part_.columns; i++) values[i] = narrow_to<T>(widen(source[i]));
        }
    }

    std::vector<Held> tensors_;
    WeightPart part_{};
    WeightSource source_{};
};

}  // namespace llama
