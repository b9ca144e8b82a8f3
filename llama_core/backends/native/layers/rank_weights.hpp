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
            reserve_switches(layer);
        }
        final_norm = Activations<T>(1, s.dim);
        head = Linear<T>(*formats.back(), int(vocab_part(s, s.rank).size), s.dim);
    }

    size_t bytes() const {
        size_t total = embedding.bytes() + head.bytes();
        for (const Layer& l : layers) total += l.qkv.bytes() + l.out.bytes() + l.gate_up.bytes() + l.down.bytes();
        return total;
    }

    void begin(int weight, int layer, const WeightSource& source) { packing_ = {weight, layer, source}; }
    int num_tasks() const { return (rows_of(packing_.weight) + 15) / 16; }

    void pack(int task) {
        const int rows = rows_of(packing_.weight), columns = columns_of(packing_.weight);
        const WeightSource& source = packing_.source;
        for (int row = task * 16; row < std::min(rows, task * 16 + 16); row++) {
            const size_t at = size_t(row) * columns;
            if (source.groups.codes) {
                const size_t group = at / kGroupInputs;
                const float* minima = source.groups.minima ? source.groups.minima + group : nullptr;
                pack_row(GroupedRow{source.groups.codes + at, source.groups.scales + group, minima}, row, columns);
            } else if (source.is_bfloat16) {
                pack_row(static_cast<const bf16*>(source.dense) + at, row, columns);
            } else {
                pack_row(static_cast<const float*>(source.dense) + at, row, columns);
            }
        }
    }

  private:
    struct Packing {
        int weight, layer;
        WeightSource source;
    };

    void reserve_switches(Layer& layer) {
        const Shape& s = shape_;
        auto bias = [](const Linear<T>& of) { return Activations<T>(1, of.num_outputs()); };
        if (s.attention_bias) layer.qkv_bias = bias(layer.qkv);
        if (s.attention_out_bias) layer.out_bias = bias(layer.out);
        if (s.mlp_bias) layer.gate_up_bias = bias(layer.gate_up), layer.down_bias = bias(layer.down);
        if (s.qk_norm) layer.query_norm = Activations<T>(1, s.head_dim), layer.key_norm = Activations<T>(1, s.head_dim);
    }

    int rows_of(int weight) const {
        switch (weight) {
            case kEmbedding: return shape_.full_vocab;
            case kQuery: return query_width(shape_);
            case kKey:
            case kValue: return kv_width(shape_);
            case kOut:
            case kDown: return shape_.dim;
            case kGate:
            case kUp: return shape_.hidden;
            case kHead: return int(vocab_part(shape_, shape_.rank).size);
            default: return 1;
        }
    }

    int columns_of(int weight) const {
        switch (weight) {
            case kEmbedding: return int(embedding_part(shape_, shape_.rank).size);
            case kOut:
            case kQueryBias: return query_width(shape_);
            case kKeyBias:
            case kValueBias: return kv_width(shape_);
            case kDown:
            case kGateBias:
            case kUpBias: return shape_.hidden;
            case kQueryNorm:
            case kKeyNorm: return shape_.head_dim;
            default: return shape_.dim;
        }
    }

    template <class S>
    void pack_row(const S& source, int row, int columns) {
        Layer& layer = layers[packing_.layer];
        const int queries = query_width(shape_);
        auto copy = [&](T* to) {
            if constexpr (std::is_pointer_v<S>)
                for (int i = 0; i < columns; i++) to[i] = narrow_to<T>(widen(source[i]));
        };
        auto copy_gate_up = [&](T* to) {
            if constexpr (std::is_pointer_v<S>)
                for (int i = 0; i < columns; i++) to[i / 16 * 32 + i % 16] = narrow_to<T>(widen(source[i]));
        };
        switch (packing_.weight) {
            case kEmbedding: return copy(embedding.as<T>() + size_t(row) * columns);
            case kQuery: return layer.qkv.pack(source, row);
            case kKey: return layer.qkv.pack(source, queries + row);
            case kValue: return layer.qkv.pack(source, queries + kv_width(shape_) + row);
            case kOut: return layer.out.pack(source, row);
            case kGate: return layer.gate_up.pack(source, row / 16 * 32 + row % 16);
            case kUp: return layer.gate_up.pack(source, row / 16 * 32 + 16 + row % 16);
            case kDown: return layer.down.pack(source, row);
            case kAttentionNorm: return copy(layer.attention_norm[0]);
            case kFfnNorm: return copy(layer.ffn_norm[0]);
            case kFinalNorm: return copy(final_norm[0]);
            case kHead: return head.pack(source, row);
            case kQueryBias: return copy(layer.qkv_bias[0]);
            case kKeyBias: return copy(layer.qkv_bias[0] + queries);
            case kValueBias: return copy(layer.qkv_bias[0] + queries + kv_width(shape_));
            case kOutBias: return copy(layer.out_bias[0]);
            case kGateBias: return copy_gate_up(layer.gate_up_bias[0]);
            case kUpBias: return copy_gate_up(layer.gate_up_bias[0] + 16);
            case kDownBias: return copy(layer.down_bias[0]);
            case kQueryNorm: return copy(layer.query_norm[0]);
            case kKeyNorm: return copy(layer.key_norm[0]);
        }
    }

    const Shape shape_;
    Packing packing_{};
};

}  // namespace llama
