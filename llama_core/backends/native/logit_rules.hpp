// Changes one row of logits before a token is sampled, as llama_core/backends/logit_rules.py defines it: tokens that are not
// allowed, biases and penalties.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "abi.hpp"
#include "base/simd.hpp"
#include "base/waiting.hpp"

namespace llama {

// One slot's sampling parameters: the fields that llama_core/scheduling/sampling_params.py marks PerSlot, in its order.
// clang-format off
#define LLAMA_SLOT_SAMPLING(field)                                                                                            \
    field(float, temperature) field(float, top_p) field(int64_t, top_k) field(int64_t, seed) field(float, min_p)              \
    field(float, presence_penalty) field(float, frequency_penalty) field(float, repetition_penalty)
LLAMA_DEFINE_STRUCT(SlotSampling, LLAMA_SLOT_SAMPLING)

// What else one slot's logits are changed by. `prompt_length`: its first tokens, which were not generated. `biases` [num_biases]
// are added to the logits of `bias_tokens`. `delayed` [num_delayed] are not sampled before the position `first_end`. Each of
// `bad_words` is its length and its tokens. `allowed`: a bit for each token, or null for all tokens.
#define LLAMA_LOGIT_RULES(field)                                                                                              \
    field(int32_t, prompt_length) field(int32_t, first_end) field(int32_t, num_biases) field(int32_t, num_delayed)            \
    field(int32_t, num_bad_words) field(const int32_t*, bias_tokens) field(const float*, biases)                              \
    field(const int32_t*, delayed) field(const int32_t*, bad_words) field(const uint32_t*, allowed)
LLAMA_DEFINE_STRUCT(LogitRules, LLAMA_LOGIT_RULES)

// The tokens that a grammar allows for one sample. Another thread writes `bits`, one for each token, and then sets `is_ready`.
#define LLAMA_TOKEN_MASK(field) field(const uint32_t*, bits) field(uint32_t*, is_ready)
LLAMA_DEFINE_STRUCT(TokenMask, LLAMA_TOKEN_MASK)

// Returns the seconds waited.
inline double wait(const TokenMask& mask) {
    std::atomic_ref<uint32_t> is_ready(*mask.is_ready);
    if (is_ready.load(std::memory_order_acquire)) return 0;
    const double began = seconds_now();
    CoreSharing sharing;
    for (int i = 0; !is_ready.load(std::memory_order_acquire); i++) i < 64 ? relax() : sharing.yield();
    return seconds_now() - began;
}
// clang-format on

class LogitEditor {
  public:
    explicit LogitEditor(int vocab)
        : vocab_(vocab), edited_(new float[vocab]), uses_(static_cast<uint32_t*>(std::calloc(vocab, sizeof(uint32_t)))) {}

    // The changed logits, valid until the next call. `tokens`: of positions 0 .. position of the sequence. `rules` and `mask`,
    // which is ready, may be null.
    const float* edit(const float* logits, const int64_t* tokens, int64_t position, const SlotSampling& how,
                      const LogitRules* rules, const TokenMask* mask) {
        std::memcpy(edited_.get(), logits, vocab_ * sizeof(float));
        if (mask) keep(mask->bits);
        if (rules) {
            if (rules->allowed) keep(rules->allowed);
            ban_words(*rules, tokens, position);
            if (position < rules->first_end)
                for (int i = 0; i < rules->num_delayed; i++) edited_[rules->delayed[i]] = kNever;
            for (int i = 0; i < rules->num_biases; i++) edited_[rules->bias_tokens[i]] += rules->biases[i];
            penalize(how, tokens, rules->prompt_length, position);
        }
        return edited_.get();
    }

  private:
    static constexpr float kNever = -std::numeric_limits<float>::infinity();
    static constexpr uint32_t kSeen = 1u << 31;

    struct Free {
        void operator()(void* p) const { std::free(p); }
    };

    // A bit for each lane selects its logit: a branch for each token takes ten times as long where bits are mixed.
    void keep(const uint32_t* bits) {
        int32_t bits_of_lanes[kLanes];
        for (int lane = 0; lane < kLanes; lane++) bits_of_lanes[lane] = 1 << lane;
        const IVec lane_bit = load_as<IVec>(bits_of_lanes);
        int i = 0;
        for (; i + kLanes <= vocab_; i += kLanes) {
            const int32_t part = bits[i / 32] >> i % 32 & ((1u << kLanes) - 1);
            if (part == (1 << kLanes) - 1) continue;
            const IVec is_allowed = ((IVec{} + part) & lane_bit) != 0;
            store(&edited_[i], select(is_allowed, load(&edited_[i]), splat(kNever)));
        }
        for (; i < vocab_; i++)
            if (!(bits[i / 32] >> i % 32 & 1)) edited_[i] = kNever;
    }

    // The last token of each bad word whose other tokens were the latest generated ones.
    void ban_words(const LogitRules& rules, const int64_t* tokens, int64_t position) {
        const int32_t* word = rules.bad_words;
        for (int i = 0; i < rules.num_bad_words; i++) {
            const int before = *word++ - 1;
            bool follows = position - before >= rules.prompt_length;
            for (int j = 0; follows && j < before; j++) follows = tokens[position - before + j] == word[j];
            if (follows) edited_[word[before]] = kNever;
            word += before + 1;
        }
    }

    // uses_ counts each token's uses among the generated ones, and is zero again afterwards.
    void penalize(const SlotSampling& how, const int64_t* tokens, int64_t prompt_length, int64_t position) {
        if (how.repetition_penalty == 1.0f && how.frequency_penalty == 0.0f && how.presence_penalty == 0.0f) return;
        for (int64_t i = prompt_length; i < position; i++) uses_[tokens[i]]++;
        if (how.repetition_penalty != 1.0f)
            for (int64_t i = 0; i < position; i++) {
                uint32_t& uses = uses_[tokens[i]];
                if (uses & kSeen) continue;
                uses |= kSeen;
                float& logit = edited_[tokens[i]];
                logit = logit > 0 ? logit / how.repetition_penalty : logit * how.repetition_penalty;
            }
        for (int64_t i = prompt_length; i < position; i++) {
            uint32_t& uses = uses_[tokens[i]];
            const uint32_t count = uses & ~kSeen;
            if (!count) continue;
            uses &= kSeen;
            edited_[tokens[i]] -= how.frequency_penalty * float(count);
            edited_[tokens[i]] -= how.presence_penalty;
        }
        for (int64_t i = 0; i < position; i++) uses_[tokens[i]] = 0;
    }

    int vocab_;
    std::unique_ptr<float[]> edited_;
    std::unique_ptr<uint32_t[], Free> uses_;  // pages exist once a slot has penalties
};

}  // namespace llama
