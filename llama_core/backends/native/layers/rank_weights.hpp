// The weights of one rank, packed row by row as Python reads them.
#pragma once

#include <vector>

#include "../step_abi.hpp"
#include "linear.hpp"

namespace llama {

constexpr int kMatricesPerLayer = 4;

// This rank's part of a weight as the checkpoint has it, [outputs][inputs]: dense, or matrices in groups.
struct WeightSource {
    const void* dense = nullptr;
    bool is_bfloat16 = false;  // else float32
    GroupedRow groups{};       // of the first row; codes null if the source is dense
};

// Memory is reserved when the object is made. `begin` names the weight that the following calls of `pack` fill.
template <class T>
struct RankWeights {
    struct Layer {
        Linear<T> qkv, out, gate_up, down;  // gate_up: 16 outputs of the gate, then the same 16 of up, and so on
        Activations<T> attention_norm, ffn_norm;
        // One row each, in the order of the outputs of their layer; without memory where the model has none. out_bias and
        // down_bias are added to the sum over all ranks.
        Activations<T> qkv_bias, out_bias, gate_up_bias, down_bias;
        Activations<T> query_norm, key_norm;  // [head_dim], padded with zeros
    };
    Memory embedding;  // T [full_vocab][columns of this rank]
    std::vector<Layer> layers;
    Activations<T> final_norm;
    Linear<T> head;

    // `formats`: of qkv, out, gate_up and down of each layer, then of the head.
    RankWeights(const Shape& shape, const std::vector<const WeightFormat<T>*>& formats) : shape_(shape) {
        const Shape& s = shape_;
        embedding = Memory(s.full_vocab * embedding_part(s, s.rank).size * sizeof(T));
        for (int i = 0; i < s.layers; i++) {
            Layer& layer = layers.emplace_back();
            const auto of = formats.begin() + i * kMatricesPerLayer;
            layer.qkv = Linear<T>(*of[0], query_width(s) + 2 * kv_width(s), s.dim);
            layer.out = Linear<T>(*of[1], s.dim, query_width(s));
            layer.gate_up = Linear<T>(*of[2], round16(s.hidden) * 2, s.dim);
            layer.down = Linear<T>(*of[3], s.dim, s.hidden);
            layer.attention_norm = Activations<T>(1, s.dim);
            layer.ffn_norm = Activations<T>(1, s.dim);
        }
        final_norm = Activations<T>(1, s.dim);
        head = Linear<T>(*formats.back(), int(vocab_part(s, s.rank).size), s.dim);
    }

    size_t bytes() const {
        size_t total = embedding.bytes() + head.bytes();
        for (const Layer& l : layers) total += l.qkv.bytes() + l.out.bytes() + l.gate_up.bytes() + l.down.bytes();
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
    // The output of gate_up that holds row `at` of the gate's rows and then those of up.
    int gate_up_output(int at) const {
        const int is_up = at >= shape_.hidden, row = at - is_up * shape_.hidden;
        return row / 16 * 32 + is_up * 16 + row % 16;
    }

    template <class S>
    void pack_row(const S& source, int row) {
        Layer& layer = layers[part_.layer];
        const int at = part_.first + row;
        auto copy_to = [&](auto&& place) {  // place: of a value by its column
            if constexpr (std::is_pointer_v<S>)
                for (int i = 0; i < part_.columns; i++) place(i) = narrow_to<T>(widen(source[i]));
        };
        auto copy = [&](T* to) { copy_to([&](int i) -> T& { return to[i]; }); };
        auto reserved = [](Activations<T>& vector, int width) {  // of models that have it
            if (!vector.data) vector = Activations<T>(1, width);
            return vector[0];
        };
        switch (Tensor(part_.tensor)) {
            case Tensor::kEmbedding: return copy(embedding.as<T>() + size_t(row) * part_.columns);
            case Tensor::kQkv: return layer.qkv.pack(source, at);
            case Tensor::kOut: return layer.out.pack(source, at);
            case Tensor::kGateUp: return layer.gate_up.pack(source, gate_up_output(at));
            case Tensor::kDown: return layer.down.pack(source, at);
            case Tensor::kHead: return head.pack(source, at);
            case Tensor::kAttentionNorm: return copy(layer.attention_norm[0]);
            case Tensor::kFfnNorm: return copy(layer.ffn_norm[0]);
            case Tensor::kFinalNorm: return copy(final_norm[0]);
            case Tensor::kQkvBias: return copy(reserved(layer.qkv_bias, layer.qkv.num_outputs()) + at);
            case Tensor::kOutBias: return copy(reserved(layer.out_bias, layer.out.num_outputs()) + at);
            case Tensor::kDownBias: return copy(reserved(layer.down_bias, layer.down.num_outputs()) + at);
            case Tensor::kGateUpBias: {
                T* bias = reserved(layer.gate_up_bias, layer.gate_up.num_outputs());
                return copy_to([&](int i) -> T& { return bias[gate_up_output(at + i)]; });
            }
            case Tensor::kQueryNorm: return copy(reserved(layer.query_norm, shape_.head_dim));
            case Tensor::kKeyNorm: return copy(reserved(layer.key_norm, shape_.head_dim));
        }
    }

    const Shape shape_;
    WeightPart part_{};
    WeightSource source_{};
};

}  // namespace llama
