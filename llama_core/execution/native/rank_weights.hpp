// The weights of one rank, packed row by row as Python reads them.
#pragma once

#include <vector>

#include "linear.hpp"
#include "step_abi.hpp"

namespace llama {

// Memory is reserved when the object is made. `begin` names the weight that the following calls of `pack` fill.
template <class T>
struct RankWeights {
    struct Layer {
        Linear<T> qkv, out, gate_up, down;  // gate_up: 16 outputs of the gate, then the same 16 of up, and so on
        Activations<T> attention_norm, ffn_norm;
    };
    Memory embedding;  // T [full_vocab][dim / ranks]
    std::vector<Layer> layers;
    Activations<T> final_norm;
    Linear<T> head;

    RankWeights(const Shape& shape, const WeightFormat<T>& format) : shape_(shape) {
        const Shape& s = shape_;
        embedding = Memory(s.full_vocab * embedding_part(s) * sizeof(T));
        for (int i = 0; i < s.layers; i++) {
            Layer& layer = layers.emplace_back();
            layer.qkv = Linear<T>(format, query_width(s) + 2 * kv_width(s), s.dim);
            layer.out = Linear<T>(format, s.dim, query_width(s));
            layer.gate_up = Linear<T>(format, round16(s.hidden) * 2, s.dim);
            layer.down = Linear<T>(format, s.dim, s.hidden);
            layer.attention_norm = Activations<T>(1, s.dim);
            layer.ffn_norm = Activations<T>(1, s.dim);
        }
        final_norm = Activations<T>(1, s.dim);
        head = Linear<T>(format, s.vocab, s.dim);
    }

    size_t bytes() const {
        size_t total = embedding.bytes() + head.bytes();
        for (const Layer& l : layers) total += l.qkv.bytes() + l.out.bytes() + l.gate_up.bytes() + l.down.bytes();
        return total;
    }

    // `source`: this rank's part of the weight as the checkpoint has it, [outputs][inputs].
    void begin(int weight, int layer, const void* source, bool source_is_bfloat16) {
        packing_ = {weight, layer, source, source_is_bfloat16};
    }
    int num_tasks() const { return (rows_of(packing_.weight) + 15) / 16; }

    void pack(int task) {
        const int rows = rows_of(packing_.weight), columns = columns_of(packing_.weight);
        for (int row = task * 16; row < std::min(rows, task * 16 + 16); row++)
            if (packing_.source_is_bfloat16)
                pack_row(static_cast<const bf16*>(packing_.source) + size_t(row) * columns, row, columns);
            else
                pack_row(static_cast<const float*>(packing_.source) + size_t(row) * columns, row, columns);
    }

  private:
    struct Packing {
        int weight, layer;
        const void* source;
        bool source_is_bfloat16;
    };

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
            case kHead: return shape_.vocab;
            default: return 1;
        }
    }

    int columns_of(int weight) const {
        switch (weight) {
            case kEmbedding: return int(embedding_part(shape_));
            case kOut: return query_width(shape_);
            case kDown: return shape_.hidden;
            default: return shape_.dim;
        }
    }

    template <class S>
    void pack_row(const S* source, int row, int columns) {
        Layer& layer = layers[packing_.layer];
        const int queries = query_width(shape_);
        auto copy = [&](T* to) {
            for (int i = 0; i < columns; i++) to[i] = narrow_to<T>(widen(source[i]));
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
        }
    }

    const Shape shape_;
    Packing packing_{};
};

}  // namespace llama
