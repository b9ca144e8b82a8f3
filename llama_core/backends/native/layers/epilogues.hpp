// Epilogues of linear layers that need nothing but the rows they write: see projection.hpp.
#pragma once

#include "../step_abi.hpp"
#include "adapters.hpp"

namespace llama {

template <class T>
struct StoreTo {
    const Rows<T>& to;
    void operator()(int row, int tile, const float* out) const {
        for (int i = 0; i < kTileOutputs; i += kLanes) store(to[row] + tile * kTileOutputs + i, load(out + i));
    }
};

template <class T>
struct AddTo {
    const Rows<T>& to;
    float factor;
    void operator()(int row, int tile, const float* out) const {
        T* state = to[row] + tile * kTileOutputs;
        for (int i = 0; i < kTileOutputs; i += kLanes) {
            Vec sum = round_to<T>(load(out + i));
            if (factor != 1.0f) sum = round_to<T>(sum * splat(factor));
            store(state + i, load(state + i) + sum);
        }
    }
};

// Adds a bias, and the tokens' adapters, to the results before the epilogue `then` takes them. `bias`: of all outputs of the
// layer, with padding, or null. `adapters`: null where no token of the step has one.
template <class T, class Epilogue>
struct Adjusted {
    const T* bias;
    const Adapters<T>* adapters;
    int matrix;
    const Epilogue& then;
    void operator()(int row, int tile, const float* out) const {
        alignas(64) float sums[kTileOutputs];
        for (int i = 0; i < kTileOutputs; i += kLanes)
            store(sums + i, bias ? load(out + i) + load(bias + tile * kTileOutputs + i) : load(out + i));
        if (adapters) adapters->expand(matrix, row, tile, sums);
        then(row, tile, sums);
    }
};

inline Vec sigmoid(Vec x) { return reciprocal(splat(1.0f) + exp(-x)); }

// silu, or gelu by tanh (Hendrycks and Gimpel 2016): x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
inline Vec activated(Vec x, Variant variant) {
    if (variant == kPlain) return x * sigmoid(x);
    return x * sigmoid(x * fma(x * x, splat(0.07135481627f), splat(1.595769122f)));
}

// The gates of model/operations.py's GatedLinear. Of an output tile, 16 outputs are the gate's and 16 are up's.
template <class T, Variant kVariant>
struct Gate {
    const Rows<T>& to;
    void operator()(int row, int tile, const float* out) const {
        Vec gate = round_to<T>(load(out)), up = round_to<T>(load(out + 16));
        if constexpr (kVariant == kClampedSwiglu) {
            const Vec limit = splat(7.0f);  // comparisons are false for NaN, which stays
            gate = select(gate > limit, limit, gate);
            up = select(up > limit, limit, select(up < -limit, -limit, up)) + splat(1.0f);
            gate = round_to<T>(gate * sigmoid(gate * splat(1.702f)));
        } else {
            gate = round_to<T>(activated(gate, kVariant));
        }
        store(to[row] + tile * 16, gate * up);
    }
};

}  // namespace llama
