// Mixtures of experts: which experts a step's tokens need, and the rows of activations in the order of the experts.
//
// A row is a token under one of its experts. The rows of an expert lie side by side, so that its matrices are read once a step.
// Every rank scores all experts with the same operations in the same order, so that all choose the same ones.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "epilogues.hpp"
#include "projection.hpp"

namespace llama {

template <class T>
class Experts {
  public:
    Experts(const Shape& s, const std::vector<Operation>& operations) {
        for (const Operation& each : operations)
            if (each.kind == kRoute) {
                count_ = each.experts, chosen_ = std::max(chosen_, each.chosen);
                scales_inputs_ |= each.variant == kScalesInputs;
            }
        const size_t pairs = size_t(s.max_tokens) * chosen_;
        max_rows_ = pairs + (kUnit - 1) * std::min<size_t>(count_, pairs);
        stride_ = round_up(count_, kLanes);
        logits_.resize(s.max_tokens * stride_, -std::numeric_limits<float>::infinity());
        choices_.resize(pairs);
        begins_.resize(count_), counts_.resize(count_);
        active_.reserve(count_);
        for (auto& ends : ends_) ends.reserve(count_);
    }

    // Reserves what the experts of a layer need.
    void reserve(const Linear<T>& gates, const Linear<T>& down) {
        reserve(gathered_, gates);
        if (!gated_.rows.data) gated_.rows = Activations<T>(max_rows_, down.inputs());
        reserve(gated_, down);
        if (!results_.data) results_ = Activations<float>(max_rows_, outputs_of(down));
    }

    size_t bytes() const { return gathered_.bytes() + gated_.bytes() + results_.bytes() + logits_.size() * sizeof(float); }

    int score_tasks(int tokens) const { return (tokens + kTokens - 1) / kTokens * score_parts(); }

    // Logits of 16 tokens for 16 experts. router: [experts][dim, to whole vectors]; bias: [experts] or null. x: as the router.
    void score(int task, int tokens, const Rows<T>& x, const T* router, const T* bias, int dim) {
        const int begin = task / score_parts() * kTokens, first = task % score_parts() * kLanes;
        for (int t = begin; t < std::min(tokens, begin + kTokens); t++)
            for (int e = first; e < std::min(count_, first + kLanes); e += kTogether) {
                Vec sums[kTogether] = {};
                const T* rows[kTogether];
        UNROLL for (int i = 0; i < kTogether; i++) rows[i] = router + size_t(std::min(e + i, count_ - 1)) * round16(dim);
                for (int k = 0; k < dim; k += kLanes) {
                    const Vec inputs = load(x[t] + k);
                    UNROLL for (int i = 0; i < kTogether; i++) sums[i] = fma(inputs, load(rows[i] + k), sums[i]);
                }
                for (int i = 0; i < std::min(kTogether, count_ - e); i++)
                    logits_[t * stride_ + e + i] = sum(sums[i]) + (bias ? widen(bias[e + i]) : 0.0f);
            }
    }

    // row: of the token under this expert.
    struct Choice {
        int expert;
        float weight;
        int row;
    };
    const Choice* choices_of(int token) const { return &choices_[size_t(token) * chosen_]; }

    // The experts of a token, in the order of their numbers, and their weights. Of equal logits the lower number wins.
    void choose(const Operation& of, int token) {
        const float* logits = &logits_[token * stride_];
        Choice* choices = choices_of(token);
        for (int i = 0; i < of.chosen; i++) {
            int best = -1;
            for (int e = 0; e < count_; e++) {
                const bool is_taken = std::any_of(choices, choices + i, [e](const Choice& each) { return each.expert == e; });
                if (!is_taken && (best < 0 || logits[e] > logits[best])) best = e;
            }
            choices[i] = {best, logits[best], 0};
        }
        const Vec most = splat(choices[0].weight);
        std::sort(choices, choices + of.chosen, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
        float total = of.variant == kScalesInputs;
        if (of.variant == kScoresAll) {
            Vec all = Vec{};
            for (size_t e = 0; e < stride_; e += kLanes) all += exp(load(logits + e) - most);
            total = sum(all);
        }
        for (int i = 0; i < of.chosen; i++) {
            alignas(64) float lanes[kLanes];
            const Vec logit = splat(choices[i].weight);
            store(lanes, of.variant == kScalesInputs ? round_to<T>(sigmoid(logit)) : exp(logit - most));
            choices[i].weight = lanes[0];
            if (of.variant == kPlain) total += lanes[0];
        }
        for (int i = 0; i < of.chosen; i++) choices[i].weight /= total;
    }

    // Gives each choice its row, and cuts the products of all experts into tasks.
    void group(const Operation& of, int tokens, const Linear<T>& gates, const Linear<T>& down, const Projection<T>& projection) {
        std::fill(counts_.begin(), counts_.end(), 0);
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < of.chosen; i++) choices_of(t)[i].row = counts_[choices_of(t)[i].expert]++;
        active_.clear();
        for (auto& ends : ends_) ends.clear();
        for (auto& next : next_) next = 0;
        int begin = 0, tasks[2] = {};
        for (int e = 0; e < count_; e++) {
            begins_[e] = begin;
            if (!counts_[e]) continue;
            begin += int(round_up(counts_[e], kUnit));
            active_.push_back(e);
            ends_[0].push_back(tasks[0] += projection.tasks_of(product(gates, gathered_, e)));
            ends_[1].push_back(tasks[1] += projection.tasks_of(product(down, gated_, e)));
        }
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < of.chosen; i++) choices_of(t)[i].row += begins_[choices_of(t)[i].expert];
    }

    // Copies a token to its rows, in the form that its experts multiply. Where weights multiply inputs, they become 1.
    void gather(const Operation& of, const T* x, int dim, InputForm form, int token) {
        for (int i = 0; i < of.chosen; i++) {
            const int row = choices_of(token)[i].row;
            if (of.variant == kScalesInputs) {
                float& weight = choices_of(token)[i].weight;
                for (int k = 0; k < dim; k += kLanes) store(gathered_[row] + k, load(x + k) * splat(weight));
                gathered_.quantize(form, row, round16(dim), max_rows_);
                weight = 1;
            } else if (form == InputForm::kRows)
                gathered_.quantized.quantize(x, row, round16(dim), max_rows_);
            else
                std::memcpy(static_cast<void*>(gathered_[row]), x, round16(dim) * sizeof(T));
        }
    }
    void quantize(const Operation& of, const Linear<T>& down, int token) {
        for (int i = 0; i < of.chosen; i++)
            gated_.quantize(down.format().input_form, choices_of(token)[i].row, round16(down.inputs()), max_rows_);
    }

    // Tasks of the products of all experts, until none is left. bias: of the outputs of all experts, or null.
    template <class Epilogue>
    void run(bool is_down, const Linear<T>& w, const T* bias, const Projection<T>& projection, int thread, const Epilogue& epilogue) {
        const std::vector<int>& ends = ends_[is_down];
        for (int unit; (unit = next_[is_down].fetch_add(1)) < ends.back();) {
            const size_t at = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
            const Product<T> each = product(w, is_down ? gated_ : gathered_, active_[at]);
            const int task = at ? unit - ends[at - 1] : unit;
            if (bias)
                projection.run(each, task, thread, Adjusted<T, Epilogue>{bias + each.tile * kTileOutputs, nullptr, 0, epilogue});
            else
                projection.run(each, task, thread, epilogue);
        }
    }
    const Rows<T>& gated() const { return gated_.rows; }
    const Rows<float>& results() const { return results_; }

    // Values i .. i + 15 of the sum of a token's experts.
    Vec total(const Operation& of, int token, int i) const {
        Vec sum = Vec{};
        for (const Choice *each = choices_of(token), *end = each + of.chosen; each < end; each++)
            sum = fma(splat(each->weight), load(results_[each->row] + i), sum);
        return sum;
    }

  private:
    static constexpr size_t kUnit = 16;  // rows of a register tile, with which an expert's begin
    static constexpr int kTokens = 16, kTogether = 4;

    int score_parts() const { return int(stride_) / kLanes; }
    Choice* choices_of(int token) { return &choices_[size_t(token) * chosen_]; }
    int outputs_of(const Linear<T>& w) const { return w.num_outputs() / count_; }
    Product<T> product(const Linear<T>& w, const Inputs<T>& x, int expert) const {
        const int tiles = w.output_tiles() / count_;
        return {w, x, counts_[expert], begins_[expert], expert * tiles, tiles};
    }
    void reserve(Inputs<T>& inputs, const Linear<T>& w) {
        const InputForm form = w.format().input_form;
        if ((form == InputForm::kDense || scales_inputs_) && !inputs.rows.data) inputs.rows = Activations<T>(max_rows_, w.inputs());
        inputs.reserve(form, max_rows_, w.inputs(), true);
    }

    int count_ = 0, chosen_ = 0;
    bool scales_inputs_ = false;
    size_t max_rows_ = 0, stride_ = 0;
    std::vector<float> logits_;                 // [tokens][stride_]
    std::vector<Choice> choices_;               // [tokens][chosen_]
    std::vector<int> begins_, counts_, active_; // rows of each expert; the experts with rows
    std::vector<int> ends_[2];                  // of the tasks of each active expert's two products
    std::atomic<int> next_[2] = {};             // of these tasks
    Inputs<T> gathered_, gated_;
    Activations<float> results_;
};

}  // namespace llama
