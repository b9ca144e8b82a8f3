// Samples one token from one row of logits, as llama_core/backends/sampling.py defines it, without sorting the vocabulary.
//
// The sampler puts tokens into buckets by the distance of their logit from the greatest. It adds up whole buckets, and sorts
// two: the bucket in which the nucleus ends, and the bucket into which the random number falls.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "base/simd.hpp"
#include "logit_rules.hpp"

namespace llama {

constexpr float kGreedyBelow = 1e-5f;  // GREEDY_BELOW in sampling.py

inline uint64_t splitmix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

inline double uniform(int64_t seed, int64_t position) {
    return double(splitmix64(splitmix64(uint64_t(seed)) + uint64_t(position)) >> 11) * 0x1p-53;
}

class Sampler {
  public:
    static constexpr int64_t kNotFinite = -1, kNothingAllowed = -2;  // instead of a token

    explicit Sampler(int vocab) : probs_(round_up(vocab, kLanes)), bucket_(round_up(vocab, kLanes)), editor_(vocab) {
        members_.reserve(vocab);
    }

    // The token for `position`, or kNotFinite if a logit is not finite.
    int64_t sample(const float* logits, int vocab, const SlotSampling& how, int64_t position) {
        const float highest = greatest(logits, vocab);
        if (!std::isfinite(highest)) return kNotFinite;
        return sample_below<false>(logits, vocab, how, position, highest);
    }

    // Likewise, from logits that `LogitEditor` changes; kNothingAllowed if no token is allowed.
    int64_t sample_edited(const float* logits, int vocab, const SlotSampling& how, int64_t position, const int64_t* tokens,
                          const LogitRules* rules, const TokenMask* mask) {
        if (!std::isfinite(greatest(logits, vocab))) return kNotFinite;
        if (mask) waited_ += wait(*mask);
        if (mask && !rules && collect(mask->bits, vocab)) return sample_collected(logits, how, position);
        const float* edited = editor_.edit(logits, tokens, position, how, rules, mask);
        const float highest = greatest_or_infinite(edited, vocab);
        if (highest == -std::numeric_limits<float>::infinity()) return kNothingAllowed;
        return sample_below<true>(edited, vocab, how, position, highest);
    }

    // Seconds that it waited for masks of grammars, so far.
    double waited() const { return waited_; }

  private:
    // Lists the tokens that have a bit, if they are few enough for a list to be faster than a pass over all.
    bool collect(const uint32_t* bits, int vocab) {
        const int words = (vocab + 31) / 32;
        const auto word = [&](int i) { return i == vocab / 32 ? bits[i] & ((1u << vocab % 32) - 1) : bits[i]; };
        int count = 0;
        for (int i = 0; i < words; i++) count += std::popcount(word(i));
        if (count > vocab / 4 * 3) return false;
        collected_.clear();
        for (int i = 0; i < words; i++)
            for (uint32_t rest = word(i); rest; rest &= rest - 1) collected_.push_back(i * 32 + std::countr_zero(rest));
        return true;
    }

    // Samples the token that all logits would give if those of other tokens were -inf, to the bit: such tokens are in no bucket.
    int64_t sample_collected(const float* logits, const SlotSampling& how, int64_t position) {
        const int count = int(collected_.size());
        if (count == 0) return kNothingAllowed;
        few_.resize(round_up(count, kLanes));
        for (int i = 0; i < count; i++) few_[i] = logits[collected_[i]];
        const float highest = *std::max_element(few_.begin(), few_.begin() + count);
        return collected_[sample_below<true>(few_.data(), count, how, position, highest)];
    }

    // The greatest of logits that are finite or -inf.
    static float greatest_or_infinite(const float* logits, int vocab) {
        Vec most = splat(-std::numeric_limits<float>::infinity());
        int i = 0;
        for (; i + kLanes <= vocab; i += kLanes) most = max(most, load(logits + i));
        float result = max(most);
        for (; i < vocab; i++) result = std::max(result, logits[i]);
        return result;
    }

    template <bool kEdited>
    int64_t sample_below(const float* logits, int vocab, const SlotSampling& how, int64_t position, float highest) {
        // If the division leaves float's range, only the greatest logit has a probability above 0, as at temperature 0.
        if (how.temperature < kGreedyBelow || !std::isfinite(highest / how.temperature))
            return std::find(logits, logits + vocab, highest) - logits;
        if (kEdited || how.min_p > 0)
            spread<true>(logits, vocab, how, highest);
        else
            spread<false>(logits, vocab, how, highest);
        return pick(vocab, how, position);
    }

    static constexpr int kBuckets = 1024;
    static constexpr float kPerNat =
        32;  // 32 nats reach down to e^-32 of the greatest probability; the last bucket takes the rest

    // The greatest logit; NaN if any logit is not finite.
    static float greatest(const float* logits, int vocab) {
        Vec most = splat(logits[0]), zero = Vec{};
        int i = 0;
        for (; i + kLanes <= vocab; i += kLanes) {
            Vec x = load(logits + i);
            most = max(most, x);
            zero += x * splat(0.0f);  // NaN for infinity and for NaN
        }
        float result = max(most), check = sum(zero);
        for (; i < vocab; i++) result = std::max(result, logits[i]), check += logits[i] * 0.0f;
        return result + check;
    }

    // Computes probabilities, the bucket of each token, and the mass and number of tokens of each bucket. kExcludes: tokens of
    // no probability, or of less than min_p times the greatest, are in no bucket.
    template <bool kExcludes>
    void spread(const float* logits, int vocab, const SlotSampling& how, float highest) {
        const float temperature = how.temperature;
        std::fill(mass_, mass_ + kBuckets, 0.0);
        std::fill(count_, count_ + kBuckets, 0);
        const float top = highest / temperature;
        double total = 0;
        float lanes[kLanes];
        for (int i = 0; i < vocab; i += kLanes) {
            const int count = std::min(kLanes, vocab - i);
            Vec below;
            if (count == kLanes) {
                below = load(logits + i) / splat(temperature) - splat(top);
            } else {
                std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
                for (int lane = 0; lane < count; lane++) lanes[lane] = logits[i + lane] / temperature - top;
                below = load(lanes);
            }
            Vec p = exp(below);
            store(&probs_[i], p);
            Vec place = below * splat(-kPerNat);
            const Vec last = splat(float(kBuckets - 1));
            place = select(place < last, place, last);
            IVec index = convert<IVec>(place);
            store(lanes, p);
            for (int lane = 0; lane < count; lane++) {
                if (kExcludes && !(lanes[lane] > 0 && lanes[lane] >= how.min_p)) {
                    bucket_[i + lane] = kBuckets;
                    continue;
                }
                const int b = index[lane];
                bucket_[i + lane] = uint16_t(b);
                mass_[b] += lanes[lane];
                count_[b]++;
            }
        }
        for (double m : mass_) total += m;
        total_ = total;
    }

    int64_t pick(int vocab, const SlotSampling& how, int64_t position) {
        const int64_t most = how.top_k > 0 ? std::min<int64_t>(how.top_k, vocab) : vocab;
        const double limit = double(how.top_p) * (most < vocab ? mass_of_most_likely(most, vocab) : total_);
        // The mass of the nucleus: tokens in order, as long as the mass before them is within the limit.
        double before = 0, nucleus = 0;
        int64_t number = 0;
        for (int b = 0; b < kBuckets; b++) {
            if (before > limit || number >= most) break;
            if (before + mass_[b] <= limit && number + count_[b] <= most) {
                before += mass_[b];
                number += count_[b];
                nucleus = before;
                continue;
            }
            for (int token : sorted(b, vocab)) {
                if (before > limit || number >= most) break;
                before += probs_[token];
                number++;
            }
            nucleus = before;
            break;
        }
        const double target = uniform(how.seed, position) * nucleus;
        double reached = 0;
        int64_t latest = 0;
        for (int b = 0; b < kBuckets; b++) {
            if (!count_[b]) continue;
            if (reached + mass_[b] <= target) {
                reached += mass_[b];
                continue;
            }
            for (int token : sorted(b, vocab)) {
                latest = token;
                reached += probs_[token];
                if (reached > target) return token;
            }
        }
        return latest;  // two orders of summing a bucket may differ in the last bit
    }

    double mass_of_most_likely(int64_t most, int vocab) {
        double mass = 0;
        for (int b = 0; b < kBuckets && most > 0; b++) {
            if (count_[b] <= most) {
                mass += mass_[b];
                most -= count_[b];
                continue;
            }
            for (int token : sorted(b, vocab)) {
                if (most-- == 0) return mass;
                mass += probs_[token];
            }
        }
        return mass;
    }

    // The tokens of bucket `b`, most likely first, then by id.
    const std::vector<int>& sorted(int b, int vocab) {
        members_.clear();
        for (int i = 0; i < vocab; i++)
            if (bucket_[i] == b) members_.push_back(i);
        std::sort(members_.begin(), members_.end(),
                  [this](int x, int y) { return probs_[x] != probs_[y] ? probs_[x] > probs_[y] : x < y; });
        return members_;
    }

    std::vector<float> probs_;
    std::vector<uint16_t> bucket_;
    std::vector<int> members_, collected_;
    std::vector<float> few_;  // logits of the tokens in collected_
    double mass_[kBuckets];
    int64_t count_[kBuckets];
    double total_ = 0;
    LogitEditor editor_;
    double waited_ = 0;
};

}  // namespace llama
