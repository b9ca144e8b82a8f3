// The LoRA adapters of one rank: pairs of matrices A [rank][inputs] and B [outputs][rank] in places, and their products.
//
// A token whose slot has an adapter gets scale * B (A x) added to W x in float, before the epilogue rounds the result. One phase
// before each linear layer computes scale * A x of these tokens, rounded to the model's type; the layer's epilogue adds B's part
// of an output tile. Every sum has one order, so a token's values depend on the token and its adapter alone.
#pragma once

#include <algorithm>
#include <vector>

#include "../step_plan.hpp"
#include "linear.hpp"

namespace llama {

template <class T>
class Adapters {
  public:
    // `modules`: the weights that may have a pair, those of one tensor one after the other.
    Adapters(const Shape& s, size_t num_tensors, const std::vector<WeightPart>& modules,
             const std::vector<Operation>& operations)
        : rank_stride_(int(round_up(std::max(s.max_lora_rank, 1), kRanks))), of_(num_tensors + 1) {
        for (const Operation& each : operations)
            if (each.kind == kGatedLinear) of_[each.tensor].is_gated = true;
        size_t values = 0;
        for (const WeightPart& part : modules) {
            Modules& of = of_[part.tensor];
            if (!of.count++) of.first = int(modules_.size());
            Module& m = modules_.emplace_back(Module{of.is_gated, part.tensor, part.first, part.rows, part.columns});
            m.a_at = values, values += rank_stride_ * m.stride();
            m.b_at = values, values += size_t(m.blocks()) * rank_stride_ * kLanes;
            most_ = std::max(most_, of.count);
        }
        for (int i = 0; i < s.max_loras; i++) places_.emplace_back(values * sizeof(T));
        pairs_.resize(s.max_loras * modules_.size());
        if (!s.max_loras) return;
        shrunk_ = Activations<T>(s.max_tokens, most_ * rank_stride_);
        place_of_.reserve(s.max_tokens), order_.reserve(s.max_tokens), groups_.reserve(s.max_tokens + s.max_loras);
    }

    size_t bytes() const {
        size_t total = shrunk_.bytes();
        for (const Memory& place : places_) total += place.bytes();
        return total;
    }

    // Places count from 1.
    void clear(int place) {
        const auto begin = pairs_.begin() + (place - 1) * modules_.size();
        std::fill(begin, begin + modules_.size(), Pair{});
    }

    // `part`: of the weight that the pair belongs to. a float [rank][columns], b float [rows][rank].
    void pack(int place, const WeightPart& part, int rank, float scale, const float* a, const float* b) {
        for (size_t i = 0; i < modules_.size(); i++) {
            const Module& m = modules_[i];
            if (m.tensor != part.tensor || m.first != part.first) continue;
            T* values = places_[place - 1].template as<T>();
            const Pair pair = {rank, scale, values + m.a_at, values + m.b_at};
            std::fill(pair.a, pair.a + rank_stride_ * m.stride(), T{});
            std::fill(pair.b, pair.b + size_t(m.blocks()) * rank_stride_ * kLanes, T{});
            for (int r = 0; r < rank; r++) {
                for (int k = 0; k < m.inputs; k++) pair.a[r * m.stride() + k] = narrow_to<T>(a[size_t(r) * m.inputs + k]);
                for (int o = 0; o < m.outputs; o++) {
                    const int at = m.first_lane() + o;
                    T* group = pair.b + (size_t(at / kLanes) * rank_stride_ + r / kStep * kStep) * kLanes;
                    group[at % kLanes * kStep + r % kStep] = narrow_to<T>(b[size_t(o) * rank + r]);
                }
            }
            pairs_[index(place, i)] = pair;
        }
    }

    // The tokens of the step that have adapters, in groups with one adapter each.
    void plan(const StepPlan& plan, const Slots& slots) {
        groups_.clear();
        if (places_.empty()) return;
        place_of_.clear(), order_.clear();
        for (const Token& token : plan.tokens) place_of_.push_back(int(slots.adapter_places[token.slot]));
        for (int t = 0; t < plan.num_tokens(); t++)
            if (place_of_[t]) order_.push_back(t);
        std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return place_of_[a] < place_of_[b]; });
        for (int begin = 0, end; begin < int(order_.size()); begin = end) {
            for (end = begin; end < int(order_.size()) && end < begin + kGroup; end++)
                if (place_of_[order_[end]] != place_of_[order_[begin]]) break;
            groups_.push_back({begin, end});
        }
    }
    bool used() const { return !groups_.empty(); }

    // Of a matrix by its tensor's number.
    int shrink_tasks(int matrix) const { return int(groups_.size()) * of_[matrix].count * rank_blocks(); }

    // scale * A x of kRanks rows of A, for the tokens of a group.
    void shrink(int matrix, int task, const Rows<T>& x) const {
        const Modules& of = of_[matrix];
        const Group& group = groups_[task / (of.count * rank_blocks())];
        const int position = task / rank_blocks() % of.count, first = task % rank_blocks() * kRanks;
        const size_t module = of.first + position;
        const Pair& pair = pairs_[index(place_of_[order_[group.begin]], module)];
        if (first >= pair.rank) return;
        const size_t stride = modules_[module].stride();
        for (int at = group.begin; at < group.end;) {
            auto some = [&](auto count) {
                constexpr int n = decltype(count)::value;
                Vec sums[kRanks][n] = {};
                const T* rows[n];
        UNROLL for (int i = 0; i < n; i++) rows[i] = x[order_[at + i]];
                const T* a = pair.a + first * stride;
                for (size_t k = 0; k < stride; k += kLanes * kStep) {
                    UNROLL for (int i = 0; i < n; i++) {
                        const auto inputs = Dot<T>::load_next(rows[i] + k);
                        UNROLL for (int r = 0; r < kRanks; r++)
                            sums[r][i] = Dot<T>::add(sums[r][i], a + r * stride + k, inputs);
                    }
                }
                for (int i = 0; i < n; i++)
                    for (int r = 0; r < kRanks; r++)
                        shrunk_[order_[at + i]][position * rank_stride_ + first + r] =
                            narrow_to<T>(pair.scale * sum(sums[r][i]));
                at += n;
            };
            const int left = group.end - at;
            if (left >= 4)
                some(std::integral_constant<int, 4>());
            else if (left >= 2)
                some(std::integral_constant<int, 2>());
            else
                some(std::integral_constant<int, 1>());
        }
    }

    // Adds B's part of an output tile to a token's results `out` [kTileOutputs].
    void expand(int matrix, int token, int tile, float* out) const {
        const int place = place_of_[token];
        if (!place) return;
        const Modules& of = of_[matrix];
        const Pair* pair = &pairs_[index(place, of.first)];
        const T* u = shrunk_[token];
        Vec low = load(out), high = load(out + kLanes);
        const ptrdiff_t next = block_values() * (of.is_gated ? 1 : kRegisterTiles);
        // Of B's block `block` for each half of the tile; negative for none. Two sums side by side hide each other's latency.
        auto add = [&](const Pair& a, const T* u, int block, const Pair& b, const T* v, int other) {
            const int rank = block < 0 ? 0 : a.rank, other_rank = other < 0 ? 0 : b.rank;
            const T *weights = a.b + block * block_values(), *others = b.b + other * block_values();
            // A thread's next tile mostly follows, which the hardware cannot foresee.
            for (int r = 0; r < rank; r += kLineRanks) __builtin_prefetch(weights + next + r * kLanes, 0, 2);
            for (int r = 0; r < other_rank; r += kLineRanks) __builtin_prefetch(others + next + r * kLanes, 0, 2);
            int r = 0;
            for (const int common = std::min(rank, other_rank); r < common; r += kStep) {
                low = Dot<T>::add(low, weights + r * kLanes, Dot<T>::broadcast(u + r));
                high = Dot<T>::add(high, others + r * kLanes, Dot<T>::broadcast(v + r));
            }
            for (int i = r; i < rank; i += kStep) low = Dot<T>::add(low, weights + i * kLanes, Dot<T>::broadcast(u + i));
            for (int i = r; i < other_rank; i += kStep) high = Dot<T>::add(high, others + i * kLanes, Dot<T>::broadcast(v + i));
        };
        if (of.is_gated) {
            add(pair[0], u, tile, pair[1], u + rank_stride_, tile);
        } else {
            const Module* module = &modules_[of.first];
            for (int i = of.count; i > 0; i--, pair++, module++, u += rank_stride_)
                if (pair->rank) add(*pair, u, module->block_of(tile, 0), *pair, u, module->block_of(tile, 1));
        }
        store(out, low), store(out + kLanes, high);
    }

  private:
    static constexpr int kRanks = 4, kGroup = 32, kStep = Dot<T>::kStep,
                         kLineRanks = 64 / (kLanes * sizeof(T));  // of a block in a cache line

    // A weight that may have a pair. first: of its outputs, among those of the matrix.
    struct Module {
        bool is_gated;
        int tensor, first, outputs, inputs;
        size_t a_at = 0, b_at = 0;  // within a place

        size_t stride() const { return round_up(inputs, kLanes * kStep); }
        // Of gate and up, whose outputs take halves of tiles in turn, each has blocks of its own.
        int first_lane() const { return is_gated ? 0 : first % kLanes; }
        int blocks() const { return (first_lane() + outputs + kLanes - 1) / kLanes; }
        // Of gate and up, block j is half of tile j. Of others: B's block of 16 outputs for this half of an output tile, or -1.
        int block_of(int tile, int half) const {
            const int block = tile * kRegisterTiles + half - first / kLanes;
            return block < blocks() ? std::max(block, -1) : -1;
        }
    };
    // a [rank_stride_][stride], b [blocks][rank_stride_ / kStep][16][kStep]; zeros beyond the rank.
    struct Pair {
        int rank = 0;
        float scale = 0;
        T *a = nullptr, *b = nullptr;
    };
    struct Modules {
        int first = 0, count = 0;  // in modules_
        bool is_gated = false;
    };
    struct Group {
        int begin, end;  // in order_
    };

    ptrdiff_t block_values() const { return ptrdiff_t(rank_stride_) * kLanes; }
    int rank_blocks() const { return rank_stride_ / kRanks; }
    size_t index(int place, size_t module) const { return size_t(place - 1) * modules_.size() + module; }

    const int rank_stride_;
    std::vector<Module> modules_;
    std::vector<Modules> of_;  // of each tensor by its number
    int most_ = 0;             // modules of a matrix
    std::vector<Memory> places_;
    std::vector<Pair> pairs_;
    Activations<T> shrunk_;  // of each token, rank_stride_ values for each module of the matrix
    std::vector<int> place_of_, order_;
    std::vector<Group> groups_;
};

}  // namespace llama
