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
    // `formats`: of each tensor, null of those that are no matrices.
    RankWeights(const std::vector<Tensor>& tensors, const std::vector<const WeightFormat<T>*>& formats) {
        for (size_t i = 0; i < tensors.size(); i++) tensors_.emplace_back(tensors[i], formats[i]);
    }

    const Linear<T>& matrix(int tensor) const { return tensors_[tensor].matrix; }
    // A norm's factors, or the biases of a matrix in the order of its outputs, followed by zeros. T [rows][columns] of an embedding.
    // Null for no tensor.
    T* values(int tensor) const { return tensor < 0 ? nullptr : tensors_[tensor].values.template as<T>(); }

    // Of matrices and embeddings.
    size_t bytes() const {
        size_t total = 0;
        for (const Held& held : tensors_)
            total += held.is_matrix() ? held.matrix.bytes() : held.is.kind == kEmbeddingTensor ? held.values.bytes() : 0;
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
                const size_t group = at / kGroupInputs;
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
    struct Held {
        Tensor is;
        Linear<T> matrix;
        Memory values;

        Held(const Tensor& tensor, const WeightFormat<T>* format) : is(tensor) {
            const int outputs = is_gated() ? round16(is.rows / 2) * 2 : is.rows;
            if (is_matrix())
                matrix = Linear<T>(*format, outputs, is.columns);
            else if (is.kind == kEmbeddingTensor)
                values = Memory(size_t(is.rows) * is.columns * sizeof(T));
            else
                values = Memory(round_up(outputs, kTileOutputs) * sizeof(T));
        }
        bool is_matrix() const { return is.kind == kMatrix || is.kind == kGatedMatrix; }
        bool is_gated() const { return is.kind == kGatedVector || is.kind == kGatedMatrix; }
        // Of the gates' rows and then those of up: 16 outputs are gates, and the same 16 of up follow, and so on.
        int output_of(int row) const {
            if (!is_gated()) return row;
            const int half = is.rows / 2, is_up = row >= half, at = row - is_up * half;
            return at / 16 * 32 + is_up * 16 + at % 16;
        }
    };

    template <class S>
    void pack_row(const S& source, int row) {
        const Held& to = tensors_[part_.tensor];
        const int first = part_.first + row;
        if (to.is_matrix()) return to.matrix.pack(source, to.output_of(first));
        if constexpr (std::is_pointer_v<S>) {
            T* values = to.values.template as<T>() + (to.is.kind == kEmbeddingTensor ? size_t(first) * part_.columns : 0);
            const int from = to.is.kind == kEmbeddingTensor ? 0 : first;
            for (int i = 0; i < part_.columns; i++) values[to.output_of(from + i)] = narrow_to<T>(widen(source[i]));
        }
    }

    std::vector<Held> tensors_;
    WeightPart part_{};
    WeightSource source_{};
};

}  // namespace llama
