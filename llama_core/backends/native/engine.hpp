// What the C interface (engine.cpp) needs of a rank's Transformer, whatever the type of its activations.
#pragma once

#include <memory>

#include "all_gather.hpp"
#include "layers/rank_weights.hpp"
#include "step_abi.hpp"

namespace llama {

class Engine {
  public:
    explicit Engine(const Shape& shape) : shape(shape) {}
    virtual ~Engine() = default;
    virtual void pack_weight(const WeightPart& part, const WeightSource& source) = 0;
    virtual void make_cache(int blocks) = 0;
    // Runs `rows`. Writes the rows' tokens in order to `sampled`, negative where there is none (Sampler). `masks`: of each
    // sample, or null.
    virtual void step(const Row* rows, int num_rows, int64_t* sampled, bool logits_everywhere, const TokenMask* masks) = 0;
    // Writes the logits of `tokens` of the latest step, counted from its first, to `logits`, on every rank.
    virtual void logits_of(const int32_t* tokens, int count) = 0;
    // Writes the normed states [count][dim] of tokens first .. first + count of the latest step, which every rank has whole.
    virtual void hidden_states_of(int first, int count, float* states) = 0;
    // See Adapters.
    virtual void clear_adapter(int place) = 0;
    virtual void pack_adapter(int place, const WeightPart& part, int rank, float scale, const float* a, const float* b) = 0;
    virtual void poke_embedding(int token, const float* values) = 0;

    const Shape shape;
    Slots slots{};
    Memory logits;  // float [max_samples][full_vocab]
    std::unique_ptr<AllGather> all_gather;
    double seconds_sampled = 0, waited_for_masks = 0;  // since the start; the first without the second
    size_t weight_bytes = 0, working_bytes = 0;
};

}  // namespace llama
