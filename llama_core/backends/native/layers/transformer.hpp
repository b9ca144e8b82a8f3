// One rank's Transformer on CPU cores: a step of rows of any lengths, from token ids to sampled tokens, in one call.
//
// A step is a program of phases (threads.hpp) over buffers that the constructor allocates: those of each operation that Python
// lists (native/program.py), before them the embedding's and after them the head's. llama_core/backends/fused/model.py computes
// the same with torch. Every intermediate result is rounded to the model's type where Meta's reference rounds it.
//
// The parts into which a phase is cut:
//   register tile   what one AMX tile register holds: 16 rows of 64 bytes
//   output tile     32 outputs of a linear layer, packed together; half of it is one register tile wide
//   task tile       the output tiles that one task of a linear layer computes
//   row panel       the rows of activations that one task of a linear layer computes
//   K slice         the part of an output tile's inputs that a task multiplies with its row panel at a time
//   query tile      up to 16 tokens of a row, whose attention is one task for each key/value head
//   KV tile         the keys, or the values, of 16 positions under one head
//   epilogue        the function that takes the results of a linear layer while they are in the cache
#pragma once

#include "../base/threads.hpp"
#include "../engine.hpp"
#include "../sampling.hpp"
#include "../step_plan.hpp"
#include "attention_layer.hpp"
#include "epilogues.hpp"
#include "experts.hpp"
#include "linear.hpp"
#include "projection.hpp"
#include "rank_weights.hpp"
#include "rms_norm.hpp"

namespace llama {

template <class T>
class Transformer : public Engine, private Tasks {
  public:
    // `formats`: see RankWeights. `modules`: see Adapters. `operations`: the first is the embedding, the last the head.
    Transformer(const Shape& s, const std::vector<Tensor>& tensors, const std::vector<const WeightFormat<T>*>& formats,
                const std::vector<WeightPart>& modules, const std::vector<Operation>& operations, const std::vector<int>& cpus,
                const float* rotary)
        : Engine(s),
          width_(query_width(s)),
          operations_(operations),
          team_(s.threads, cpus),
          weights_(tensors, formats, operations),
          projection_(s.threads),
          attention_(s, rotary),
          adapters_(s, tensors.size(), modules, operations),
          experts_(s, operations),
          embedding_(weights_.values(operations.front().tensor)),
          head_(weights_.matrix(operations.back().tensor)) {
        for (int rank = 0; rank < s.ranks; rank++)
            columns_.push_back(embedding_part(s, rank)), vocab_.push_back(vocab_part(s, rank));
        const size_t t = s.max_tokens;
        residual_ = Activations<T>(t, s.dim);
        normed_ = Inputs<T>(t, s.dim);
        bool has_gates = false;
        for (const Operation& each : operations_) has_gates |= each.kind == kAttention && each.variant == kSigmoidGate;
        qkv_ = Activations<T>(t, width_ * (1 + has_gates) + 2 * kv_width(s));
        squares_.resize(2 * t);
        attended_ = Inputs<T>(t, width_);
        gated_ = Inputs<T>(t, s.hidden);
        last_ = Inputs<T>(s.max_samples, s.dim);
        for (const Operation& each : operations_)
            if (each.to == kProjected && !projected_.data) projected_ = Activations<T>(t, s.dim);
        reserve_inputs();
        logits = Memory(size_t(s.max_samples) * s.full_vocab * 4);
        weight_bytes = weights_.bytes();
        working_bytes = residual_.bytes() + normed_.bytes() + qkv_.bytes() + attended_.bytes() + gated_.bytes() +
                        projected_.bytes() + last_.bytes() + logits.bytes() + attention_.bytes() + projection_.working_bytes() +
                        adapters_.bytes() + experts_.bytes() + shared_.bytes();
        for (int i = 0; i < s.threads; i++) samplers_.emplace_back(s.full_vocab);
        waited_before_.resize(s.threads);
        plan_.reserve(s);
        program_.reserve(5 * operations_.size() + 12);
    }

    void make_cache(int blocks) override { attention_.make_cache(blocks); }

    void pack_weight(const WeightPart& part, const WeightSource& source) override {
        weights_.begin(part, source);
        team_.run(*this, {{kPack, 0, weights_.num_tasks()}});
    }

    void clear_adapter(int place) override { adapters_.clear(place); }
    void pack_adapter(int place, const WeightPart& part, int rank, float scale, const float* a, const float* b) override {
        adapters_.pack(place, part, rank, scale, a, b);
    }

    void poke_embedding(int token, const float* values) override {
        const size_t part = columns_[shape.rank].size;
        for (size_t i = 0; i < part; i++) embedding_[token * part + i] = narrow_to<T>(values[i]);
    }

    void step(const Row* rows, int num_rows, int64_t* sampled, bool logits_everywhere, const TokenMask* masks) override {
        plan_.plan(rows, num_rows, shape);
        adapters_.plan(plan_, slots);
        sampled_ = sampled;
        masks_ = masks;
        join_logits_ = samples() || logits_everywhere;
        make_program();
        run_program();
        if (all_gather && all_gather->failed()) return;
        for (int i = 0; i < plan_.num_samples(); i++) {
            const Sample& sample = plan_.samples[i];
            slots.tokens[size_t(sample.slot) * shape.max_seq_len + sample.position] = std::max<int64_t>(sampled[i], 0);
        }
    }

    void logits_of(const int32_t* tokens, int count) override {
        plan_.samples.clear();
        for (int i = 0; i < count; i++) plan_.samples.push_back({tokens[i], 0, 0});
        join_logits_ = true;
        program_.clear();
        add_head();
        run_program();
    }

    void hidden_states_of(int first, int count, float* states) override {
        for (int t = first; t < first + count; t++) {
            final_norm_of(t, last_[0]);
            for (int i = 0; i < shape.dim; i++) *states++ = widen(last_[0][i]);
        }
    }

  private:
    using Change = typename AttentionLayer<T>::Change;

    // Reserves what each product needs, and finds in which form the one after each operation takes its inputs.
    void reserve_inputs() {
        const Shape& s = shape;
        auto reserve = [&](Inputs<T>& inputs, const Linear<T>& w, size_t rows) {
            inputs.reserve(form_of(w), rows, w.inputs());
            projection_.reserve(s.max_tokens);
        };
        forms_.assign(operations_.size(), InputForm::kDense);
        for (size_t i = 1; i < operations_.size(); i++) {
            const Operation& each = operations_[i];
            if (each.kind == kExpertSum)
                experts_.reserve(weights_.matrix(operations_[i - 1].tensor), weights_.matrix(each.tensor));
            if (!is_product(each)) continue;
            const Linear<T>& w = weights_.matrix(each.tensor);
            if (each.from == kShared && !shared_.rows.data) shared_.rows = Activations<T>(s.max_tokens, w.inputs());
            reserve(inputs_of(each), w, s.max_tokens);
            forms_[i] = form_of(w);
            if (operations_[i - 1].to == kNormed) forms_[i - 1] = form_of(w);
        }
        reserve(last_, head_, s.max_samples);
    }

    bool samples() const { return shape.rank == shape.sampler; }
    static bool is_product(const Operation& of) { return of.kind == kLinear || of.kind == kGatedLinear; }
    // Over the ranks, because they divide the inputs.
    static bool is_summed(const Operation& of) { return of.kind == kExpertSum || (of.kind == kLinear && of.to != kQkv); }
    static InputForm form_of(const Linear<T>& w) { return w.format().input_form; }
    Inputs<T>& inputs_of(const Operation& product) {
        switch (product.from) {
            case kNormed: return normed_;
            case kAttended: return attended_;
            case kShared: return shared_;
            default: return gated_;
        }
    }
    const Activations<T>& rows_of(int buffer) const { return buffer == kResidual ? residual_ : projected_; }

    // The program.

    void add(Op op, int operation, int tasks) { program_.push_back({op, operation, tasks}); }

    void make_program() {
        const int tokens = plan_.num_tokens(), blocks = (tokens + 15) / 16, samples = plan_.num_samples();
        const bool shared = shape.ranks > 1;
        program_.clear();
        for (int i = 0; i < int(operations_.size()); i++) {
            const Operation& each = operations_[i];
            switch (Kind(each.kind)) {
                case kEmbedding:
                    add(kEmbed, i, blocks);
                    add(kShareEmbedding, i, shared);
                    add(kJoinEmbedding, i, shared * blocks);
                    break;
                case kNorm: add(kNormTokens, i, blocks); break;
                case kLinear:
                case kGatedLinear:
                    add(kQuantize, i, operations_[i - 1].to != kNormed && forms_[i] != InputForm::kDense ? blocks : 0);
                    add(kShrink, i, adapters_.shrink_tasks(each.tensor));
                    add(kProject, i, projection_.tasks_of({weights_.matrix(each.tensor), inputs_of(each), tokens}));
                    add(kShareSum, i, shared && is_summed(each));
                    add(kJoinSum, i, shared && is_summed(each) ? blocks : 0);
                    break;
                case kRotation:
                    add(kSquareHeads, i, each.variant == kAllHeads ? blocks : 0);
                    add(kShareSquares, i, shared && each.variant == kAllHeads);
                    add(kRotate, i, blocks);
                    break;
                case kAttention:
                    add(kAttend, i, plan_.attention_tasks(shape));
                    add(kGateHeads, i, each.variant == kSigmoidGate ? blocks : 0);
                    break;
                case kRoute:
                    add(kScoreExperts, i, experts_.score_tasks(tokens));
                    add(kChooseExperts, i, blocks);
                    add(kGroupExperts, i, 1);
                    add(kGatherExperts, i, blocks);
                    break;
                case kExpertGates: add(kGateExperts, i, team_.size()); break;
                case kExpertSum:
                    add(kQuantizeExperts, i, form_of(weights_.matrix(each.tensor)) != InputForm::kDense ? blocks : 0);
                    add(kProjectExperts, i, team_.size());
                    add(kSumExperts, i, blocks);
                    add(kShareSum, i, shared);
                    add(kJoinSum, i, shared * blocks);
                    break;
                case kTokenGate: add(kGateTokens, i, blocks); break;
                case kAddition: add(kAdd, i, blocks); break;
                case kHead: add_head(); break;
            }
        }
        add(kSample, 0, this->samples() ? samples : 0);
        add(kShareSampled, 0, shared && samples);
    }

    void add_head() {
        const int samples = plan_.num_samples();
        const bool shared = shape.ranks > 1 && samples;
        add(kNormFinal, 0, (samples + 15) / 16);
        add(kLogits, 0, projection_.tasks_of({head_, last_, samples}));
        add(kShareLogits, 0, shared);
        add(kJoinLogits, 0, shared && join_logits_ ? samples : 0);
    }

    void run_program() {
        phase_began_ = seconds_now();
        team_.run(*this, program_);
    }

    void run(const Phase& phase, int task, int thread) override {
        const Operation& of = operations_[phase.operation];
        const size_t tokens = plan_.tokens.size(), samples = plan_.samples.size();
        switch (phase.op) {
            case kEmbed: return over_tokens(task, [&](int t) { embed(t); });
            case kJoinEmbedding: return over_tokens(task, [&](int t) { join_embedding(t); });
            case kNormTokens: return over_tokens(task, [&](int t) { norm(of, forms_[phase.operation], t); });
            case kQuantize: {
                const int width = round16(weights_.matrix(of.tensor).inputs());
                return over_tokens(
                    task, [&](int t) { inputs_of(of).quantize(forms_[phase.operation], t, width, plan_.num_tokens()); });
            }
            case kShrink: return adapters_.shrink(of.tensor, task, inputs_of(of).rows);
            case kProject: return project(of, task, thread);
            case kJoinSum: return over_tokens(task, [&](int t) { join_sum(of, t); });
            case kSquareHeads: return over_tokens(task, [&](int t) { attention_.squares(qkv_[t], own_squares() + 2 * t); });
            case kShareSquares: return all_gather->gather(tokens * 2 * sizeof(float));
            case kRotate: return attention_.rotate(of.layer, task, plan_, slots, qkv_, [&](int t) { return changes(of, t); });
            case kAttend:
                return attention_.attend(of.layer, of.window, of.factor, weights_.values(of.tensor), task, plan_, slots,
                                         attended_.rows);
            case kGateHeads: return over_tokens(task, [&](int t) { gate_heads(t); });
            case kScoreExperts:
                return experts_.score(task, plan_.num_tokens(), normed_.rows, weights_.values(of.tensor),
                                      weights_.values(of.other), shape.dim);
            case kChooseExperts: return over_tokens(task, [&](int t) { experts_.choose(of, t); });
            case kGroupExperts: {
                const Operation *gates = &of + 1, *down = gates + 1;
                return experts_.group(of, plan_.num_tokens(), weights_.matrix(gates->tensor), weights_.matrix(down->tensor),
                                      projection_);
            }
            case kGatherExperts: {
                const InputForm form = form_of(weights_.matrix((&of + 1)->tensor));
                return over_tokens(task, [&](int t) { experts_.gather(of, normed_[t], shape.dim, form, t); });
            }
            case kGateExperts: return gate_experts(of, thread);
            case kQuantizeExperts:
                return over_tokens(task, [&](int t) { experts_.quantize(of, weights_.matrix(of.tensor), t); });
            case kProjectExperts:
                return experts_.run(true, weights_.matrix(of.tensor), shape.rank ? nullptr : weights_.values(of.other),
                                    projection_, thread, StoreTo<float>{experts_.results()});
            case kSumExperts: return over_tokens(task, [&](int t) { sum_experts(of, t); });
            case kGateTokens: return over_tokens(task, [&](int t) { gate_token(of, t); });
            case kAdd: return over_tokens(task, [&](int t) { add_projected(of, t); });
            case kNormFinal: return norm_final(task);
            case kLogits: return projection_.run({head_, last_, int(samples)}, task, thread, Logits{this});
            case kJoinLogits: return join_logits(task);
            case kSample: return sample(task, thread);
            case kShareEmbedding: return all_gather->gather(tokens * largest_part(shape.dim, shape.ranks) * sizeof(T));
            case kShareSum: return all_gather->gather(tokens * partial_stride() * sizeof(float));
            case kShareLogits: return all_gather->gather(samples * largest_part(shape.full_vocab, shape.ranks) * sizeof(float));
            case kShareSampled: return share_sampled();
            case kPack: return weights_.pack(task);
        }
    }

    // Every program sets the shapes of the tile registers, because other libraries in the process set them too.
    void enter() override { use_tiles(); }
    void leave() override { release_tiles(); }

    void ended(const Phase& phase) override {
        const double now = seconds_now();
        if (phase.op == kSample) seconds_sampled += now - phase_began_;
        if (phase.op == kSample && masks_) count_wait();
        phase_began_ = now;
    }

    template <class F>
    void over_tokens(int task, F&& f) {
        for (int t = task * 16; t < std::min(plan_.num_tokens(), task * 16 + 16); t++) f(t);
    }

    size_t partial_stride() const { return round_up(shape.dim, kTileOutputs); }

    // Embedding. Each rank has some of the columns.

    void embed(int t) {
        const Token& token = plan_.tokens[t];
        const size_t part = columns_[shape.rank].size;
        const int64_t id = slots.tokens[size_t(token.slot) * shape.max_seq_len + token.position];
        // Vector loads read beyond the width. Zeros there remove values of earlier steps that were not finite.
        std::fill(residual_[t] + shape.dim, residual_[t] + partial_stride(), T{});
        T* to = shape.ranks == 1 ? residual_[t] : reinterpret_cast<T*>(all_gather->own_part()) + t * part;
        std::memcpy(static_cast<void*>(to), embedding_ + id * part, part * sizeof(T));
        const float multiplier = widen(narrow_to<T>(shape.embedding_multiplier));
        if (multiplier != 1.0f)
            for (size_t i = 0; i < part; i++) to[i] = narrow_to<T>(widen(to[i]) * multiplier);
    }

    void join_embedding(int t) {
        for (int rank = 0; rank < shape.ranks; rank++) {
            const Part part = columns_[rank];
            std::memcpy(static_cast<void*>(residual_[t] + part.begin),
                        reinterpret_cast<const T*>(all_gather->part_of(rank)) + t * part.size, part.size * sizeof(T));
        }
    }

    // `form`: in which the next product takes the result.
    void norm(const Operation& of, InputForm form, int t) {
        const T* x = rows_of(of.from)[t];
        T* to = of.to == kNormed ? normed_[t] : of.to == kProjected ? projected_[t] : residual_[t];
        if (of.eps > 0)
            RmsNorm<T>{weights_.values(of.tensor), of.eps, of.offset}(x, shape.dim, to);
        else
            std::memcpy(static_cast<void*>(to), x, round16(shape.dim) * sizeof(T));
        if (of.to == kNormed) normed_.quantize(form, t, round16(shape.dim), plan_.num_tokens());
    }

    void final_norm_of(int token, T* to) const {
        const Operation& head = operations_.back();
        RmsNorm<T>{weights_.values(head.other), head.eps, head.offset}(residual_[token], shape.dim, to);
    }

    void norm_final(int task) {
        for (int i = task * 16; i < std::min(plan_.num_samples(), task * 16 + 16); i++) {
            final_norm_of(plan_.samples[i].token, last_[i]);
            last_.quantize(form_of(head_), i, round16(shape.dim), plan_.num_samples());
        }
    }

    // Attention.

    // Where this rank writes the sums of squares of its queries and keys, [tokens][2].
    float* own_squares() { return shape.ranks == 1 ? squares_.data() : reinterpret_cast<float*>(all_gather->own_part()); }

    std::pair<Change, Change> changes(const Operation& of, int t) {
        Change query{{weights_.values(of.tensor), of.eps, of.offset}, attention_.table(of.query_table)};
        Change key{{weights_.values(of.other), of.eps, of.offset}, attention_.table(of.key_table)};
        if (of.variant != kAllHeads) return {query, key};
        float sums[2] = {};
        for (int rank = 0; rank < shape.ranks; rank++) {
            const float* theirs =
                shape.ranks == 1 ? squares_.data() : reinterpret_cast<const float*>(all_gather->part_of(rank));
            for (int i = 0; i < 2; i++) sums[i] += theirs[2 * t + i];
        }
        query.together = key.together = true;
        query.inverse = query.norm.inverse(sums[0], shape.full_heads * shape.head_dim);
        key.inverse = key.norm.inverse(sums[1], shape.full_kv_heads * shape.head_dim);
        return {query, key};
    }

    // The gates lie behind a token's values.
    void gate_heads(int t) {
        T* to = attended_.rows[t];
        const T* gates = qkv_[t] + width_ + 2 * kv_width(shape);
        for (int i = 0; i < width_; i += kLanes) {
            alignas(64) T spare[kLanes] = {};  // zeros behind the last gate
            std::memcpy(static_cast<void*>(spare), gates + i, std::min(kLanes, width_ - i) * sizeof(T));
            store(to + i, load(to + i) * round_to<T>(sigmoid(load(spare))));
        }
    }

    // Linear layers with their epilogues.

    void project(const Operation& of, int task, int thread) {
        const Inputs<T>& x = inputs_of(of);
        if (is_summed(of) && shape.ranks > 1)
            // Rank 0's part of the sum has the bias for all ranks.
            return project(of, shape.rank ? nullptr : weights_.values(of.other), x, task, thread, Partial{this});
        const T* bias = weights_.values(of.other);
        if (of.kind == kGatedLinear)
            return with_gate(of, (of.to == kShared ? shared_ : gated_).rows,
                             [&](const auto& gate) { project(of, bias, x, task, thread, gate); });
        if (of.to == kResidual) return project(of, bias, x, task, thread, AddTo<T>{residual_, of.factor});
        project(of, bias, x, task, thread, StoreTo<T>{of.to == kQkv ? qkv_ : projected_});
    }

    // Calls run(epilogue) with the gate of an operation.
    template <class Run>
    static void with_gate(const Operation& of, const Rows<T>& to, Run&& run) {
        switch (of.variant) {
            case kGeluTanh: return run(Gate<T, kGeluTanh>{to});
            case kClampedSwiglu: return run(Gate<T, kClampedSwiglu>{to});
            default: return run(Gate<T, kPlain>{to});
        }
    }

    template <class Epilogue>
    void project(const Operation& of, const T* bias, const Inputs<T>& x, int task, int thread, const Epilogue& epilogue) {
        const Adapters<T>* adapters = adapters_.used() ? &adapters_ : nullptr;
        const Product<T> product{weights_.matrix(of.tensor), x, plan_.num_tokens()};
        if (bias || adapters)
            projection_.run(product, task, thread, Adjusted<T, Epilogue>{bias, adapters, of.tensor, epilogue});
        else
            projection_.run(product, task, thread, epilogue);
    }

    struct Partial {
        Transformer* self;
        void operator()(int row, int tile, const float* out) const {
            std::memcpy(
                reinterpret_cast<float*>(self->all_gather->own_part()) + row * self->partial_stride() + tile * kTileOutputs,
                out, kTileOutputs * 4);
        }
    };
    struct Logits {
        Transformer* self;
        void operator()(int row, int tile, const float* out) const {
            const Shape& s = self->shape;
            float* to =
                s.ranks == 1 ? self->logits.template as<float>() : reinterpret_cast<float*>(self->all_gather->own_part());
            const int vocab = int(self->vocab_[s.rank].size), width = std::min(kTileOutputs, vocab - tile * kTileOutputs);
            auto round = [](float value) { return widen(narrow_to<T>(value)); };
            to += size_t(row) * vocab + tile * kTileOutputs;
            for (int i = 0; i < width; i++) to[i] = round(round(out[i]) / s.logits_divisor);
            if (!s.logits_cap) return;  // apart, so that the loop before is one of vectors
            for (int i = 0; i < width; i++) to[i] = round(round(std::tanh(round(to[i] / s.logits_cap))) * s.logits_cap);
        }
    };

    void join_sum(const Operation& of, int t) {
        T* to = of.to == kResidual ? residual_[t] : projected_[t];
        for (int i = 0; i < shape.dim; i += kLanes) {
            Vec total = Vec{};
            for (int rank = 0; rank < shape.ranks; rank++)
                total += load(reinterpret_cast<const float*>(all_gather->part_of(rank)) + t * partial_stride() + i);
            const Vec sum = round_to<T>(total);
            store(to + i, of.to == kResidual ? load(to + i) + round_to<T>(sum * splat(of.factor)) : sum);
        }
    }

    // Experts.

    void gate_experts(const Operation& of, int thread) {
        with_gate(of, experts_.gated(), [&](const auto& gate) {
            experts_.run(false, weights_.matrix(of.tensor), weights_.values(of.other), projection_, thread, gate);
        });
    }

    void sum_experts(const Operation& of, int t) {
        if (shape.ranks > 1) {
            float* part = reinterpret_cast<float*>(all_gather->own_part()) + t * partial_stride();
            for (int i = 0; i < shape.dim; i += kLanes) store(part + i, experts_.total(of, t, i));
            return;
        }
        T* to = of.to == kResidual ? residual_[t] : projected_[t];
        for (int i = 0; i < shape.dim; i += kLanes) {
            const Vec sum = round_to<T>(experts_.total(of, t, i));
            store(to + i, of.to == kResidual ? load(to + i) + round_to<T>(sum * splat(of.factor)) : sum);
        }
    }

    // The inputs of a shared expert's last product, times the token's gate.
    void gate_token(const Operation& of, int t) {
        const T *x = normed_[t], *gate = weights_.values(of.tensor);
        Vec total = Vec{};
        for (int k = 0; k < shape.dim; k += kLanes) total = fma(load(x + k), load(gate + k), total);
        const Vec factor = round_to<T>(sigmoid(splat(sum(total))));
        T* to = shared_.rows[t];
        const int width = weights_.matrix((&of + 1)->tensor).inputs();
        for (int i = 0; i < width; i += kLanes) store(to + i, load(to + i) * factor);
    }

    void add_projected(const Operation& of, int t) {
        T* to = residual_[t];
        for (int i = 0; i < shape.dim; i += kLanes)
            store(to + i, load(to + i) + round_to<T>(load(projected_[t] + i) * splat(of.factor)));
    }

    void join_logits(int row) {
        for (int rank = 0; rank < shape.ranks; rank++) {
            const Part part = vocab_[rank];
            std::memcpy(logits.as<float>() + size_t(row) * shape.full_vocab + part.begin,
                        reinterpret_cast<const float*>(all_gather->part_of(rank)) + size_t(row) * part.size,
                        part.size * sizeof(float));
        }
    }

    // One rank samples for all: ranks on different CPUs may differ in the last bit of a logit.

    void sample(int i, int thread) {
        const Sample& sample = plan_.samples[i];
        const float* row = logits.as<float>() + size_t(i) * shape.full_vocab;
        const SlotSampling& how = slots.sampling[sample.slot];
        const LogitRules* rules = slots.rules[sample.slot];
        const TokenMask* mask = masks_ && masks_[i].bits ? &masks_[i] : nullptr;
        if (!rules && !mask) {
            sampled_[i] = samplers_[thread].sample(row, shape.full_vocab, how, sample.position);
            return;
        }
        const int64_t* tokens = slots.tokens + size_t(sample.slot) * shape.max_seq_len;
        sampled_[i] = samplers_[thread].sample_edited(row, shape.full_vocab, how, sample.position, tokens, rules, mask);
    }

    // The threads wait for the masks of different samples at the same time, and then for each other.
    void count_wait() {
        double longest = 0;
        for (size_t i = 0; i < samplers_.size(); i++) {
            longest = std::max(longest, samplers_[i].waited() - waited_before_[i]);
            waited_before_[i] = samplers_[i].waited();
        }
        waited_for_masks += longest;
        seconds_sampled -= longest;
    }

    void share_sampled() {
        const size_t bytes = plan_.samples.size() * sizeof(int64_t);
        if (samples()) std::memcpy(all_gather->own_part(), sampled_, bytes);
        all_gather->gather(bytes);
        std::memcpy(sampled_, all_gather->part_of(shape.sampler), bytes);
    }

    const int width_;  // of all heads of this rank
    const std::vector<Operation> operations_;
    std::vector<InputForm> forms_;       // of each: in which its product takes its inputs, or in which the next product does
    std::vector<Part> columns_, vocab_;  // of each rank: columns of the embedding, outputs of the head
    Team team_;
    RankWeights<T> weights_;
    Projection<T> projection_;
    AttentionLayer<T> attention_;
    Adapters<T> adapters_;
    Experts<T> experts_;
    T* const embedding_;  // [full_vocab][columns of this rank]
    const Linear<T>& head_;
    Activations<T> residual_, qkv_, projected_;
    Inputs<T> normed_, attended_, gated_, shared_, last_;
    std::vector<float> squares_;         // of each token's queries and keys, on one rank
    std::vector<Sampler> samplers_;      // one for each thread
    std::vector<double> waited_before_;  // of each, before this step

    // The step in flight.
    StepPlan plan_;
    std::vector<Phase> program_;
    int64_t* sampled_ = nullptr;
    const TokenMask* masks_ = nullptr;  // of each sample, or null where no row has a grammar
    bool join_logits_ = false;
    double phase_began_ = 0;
};

}  // namespace llama
