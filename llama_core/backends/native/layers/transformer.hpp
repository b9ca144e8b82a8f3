// One rank's Transformer on CPU cores: a step of rows of any lengths, from token ids to sampled tokens, in one call.
//
// A step is a program of phases (threads.hpp) over buffers that the constructor allocates. Names and formulas are those of
// llama_core/backends/fused/model.py, which computes the same with torch. Every intermediate result is rounded to the
// model's type where the reference rounds it.
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
#include "linear.hpp"
#include "projection.hpp"
#include "rank_weights.hpp"
#include "rms_norm.hpp"

namespace llama {

template <class T>
class Transformer : public Engine, private Tasks {
  public:
    // `formats`: see RankWeights.
    Transformer(const Shape& s, const std::vector<const WeightFormat<T>*>& formats, const std::vector<int>& cpus,
                const float* rotary)
        : Engine(s),
          width_(query_width(s)),
          team_(s.threads, cpus),
          weights_(s, formats),
          projection_(s.threads),
          attention_(s, rotary),
          adapters_(s) {
        for (int rank = 0; rank < s.ranks; rank++)
            columns_.push_back(embedding_part(s, rank)), vocab_.push_back(vocab_part(s, rank));
        const size_t t = s.max_tokens;
        hidden_states_ = Activations<T>(t, s.dim);
        normed_ = Inputs<T>(t, s.dim);
        qkv_ = Activations<T>(t, width_ + 2 * kv_width(s));
        attended_ = Inputs<T>(t, width_);
        hidden_ = Inputs<T>(t, s.hidden);
        last_ = Inputs<T>(s.max_samples, s.dim);
        reserve_inputs();
        logits = Memory(size_t(s.max_samples) * s.full_vocab * 4);
        weight_bytes = weights_.bytes();
        working_bytes = hidden_states_.bytes() + normed_.bytes() + qkv_.bytes() + attended_.bytes() + hidden_.bytes() +
                        last_.bytes() + logits.bytes() + attention_.bytes() + projection_.working_bytes() + adapters_.bytes();
        for (int i = 0; i < s.threads; i++) samplers_.emplace_back(s.full_vocab);
        waited_before_.resize(s.threads);
        plan_.reserve(s);
        program_.reserve(20 * (s.layers + 2));
    }

    void make_cache(int blocks) override { attention_.make_cache(blocks); }
    void use_windows(const int32_t* windows) override { attention_.use_windows(windows); }

    void pack_weight(const WeightPart& part, const WeightSource& source) override {
        weights_.begin(part, source);
        team_.run(*this, {{kPack, part.layer, weights_.num_tasks()}});
    }

    void clear_adapter(int place) override { adapters_.clear(place); }
    void pack_adapter(int place, const WeightPart& part, int rank, float scale, const float* a, const float* b) override {
        adapters_.pack(place, part, rank, scale, a, b);
    }

    void poke_embedding(int token, const float* values) override {
        const size_t part = columns_[shape.rank].size;
        for (size_t i = 0; i < part; i++) weights_.embedding.template as<T>()[token * part + i] = narrow_to<T>(values[i]);
    }

    void step(const Row* rows, int num_rows, int64_t* sampled, bool logits_everywhere, const TokenMask* masks) override {
        plan_.plan(rows, num_rows, shape);
        adapters_.plan(plan_, slots);
        sampled_ = sampled;
        masks_ = masks;
        join_logits_ = shape.rank == 0 || logits_everywhere;
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

  private:
    using Layer = typename RankWeights<T>::Layer;

    // Reserves what each layer multiplies, and the working memory of its format.
    void reserve_inputs() {
        const Shape& s = shape;
        auto reserve = [&](Inputs<T>& inputs, const Linear<T>& w, size_t rows, size_t width) {
            inputs.reserve(form_of(w), rows, width);
            projection_.reserve(w.format(), s.max_tokens);
        };
        for (const Layer& layer : weights_.layers) {
            reserve(normed_, layer.qkv, s.max_tokens, s.dim);
            reserve(attended_, layer.out, s.max_tokens, width_);
            reserve(normed_, layer.gate_up, s.max_tokens, s.dim);
            reserve(hidden_, layer.down, s.max_tokens, s.hidden);
        }
        reserve(last_, weights_.head, s.max_samples, s.dim);
    }

    static InputForm form_of(const Linear<T>& w) { return w.format().input_form; }
    static int quantizes(const Linear<T>& w) { return form_of(w) != InputForm::kDense; }

    // The program.

    void add(Op op, int layer, int tasks) { program_.push_back({op, layer, tasks}); }

    void make_program() {
        const int tokens = plan_.num_tokens(), blocks = (tokens + 15) / 16, samples = plan_.num_samples();
        const bool shared = shape.ranks > 1;
        program_.clear();
        add(kEmbed, 0, blocks);
        add(kShareEmbedding, 0, shared);
        add(kJoinEmbedding, 0, shared * blocks);
        for (int i = 0; i < shape.layers; i++) {
            const Layer& layer = weights_.layers[i];
            add(kNormAttention, i, blocks);
            add(kShrinkQkv, i, adapters_.shrink_tasks(kQkvMatrix));
            add(kProjectQkv, i, projection_.tasks_of(layer.qkv, tokens));
            add(kRotate, i, blocks);
            add(kAttend, i, plan_.attention_tasks(shape));
            add(kQuantizeAttended, i, quantizes(layer.out) * blocks);
            add(kShrinkOut, i, adapters_.shrink_tasks(kOutMatrix));
            add(kProjectOut, i, projection_.tasks_of(layer.out, tokens));
            add(kShareOut, i, shared);
            add(kAddOut, i, shared * blocks);
            add(kNormFfn, i, blocks);
            add(kShrinkGateUp, i, adapters_.shrink_tasks(kGateUpMatrix));
            add(kGateUp, i, projection_.tasks_of(layer.gate_up, tokens));
            add(kQuantizeHidden, i, quantizes(layer.down) * blocks);
            add(kShrinkDown, i, adapters_.shrink_tasks(kDownMatrix));
            add(kProjectDown, i, projection_.tasks_of(layer.down, tokens));
            add(kShareDown, i, shared);
            add(kAddDown, i, shared * blocks);
        }
        add_head();
        add(kSample, 0, shape.rank == 0 ? samples : 0);
        add(kShareSampled, 0, shared && samples);
    }

    void add_head() {
        const int samples = plan_.num_samples();
        const bool shared = shape.ranks > 1 && samples;
        add(kNormFinal, 0, (samples + 15) / 16);
        add(kLogits, 0, projection_.tasks_of(weights_.head, samples));
        add(kShareLogits, 0, shared);
        add(kJoinLogits, 0, shared && join_logits_ ? samples : 0);
    }

    void run_program() {
        phase_began_ = seconds_now();
        team_.run(*this, program_);
    }

    void run(const Phase& phase, int task, int thread) override {
        const Layer& layer = weights_.layers[phase.layer];
        const size_t tokens = plan_.tokens.size(), samples = plan_.samples.size();
        switch (phase.op) {
            case kEmbed: return over_tokens(task, [&](int t) { embed(t); });
            case kJoinEmbedding: return over_tokens(task, [&](int t) { join_embedding(t); });
            case kNormAttention: return over_tokens(task, [&](int t) { norm(t, layer.attention_norm[0], layer.qkv); });
            case kShrinkQkv: return adapters_.shrink(phase.layer, kQkvMatrix, task, normed_.rows);
            case kShrinkOut: return adapters_.shrink(phase.layer, kOutMatrix, task, attended_.rows);
            case kShrinkGateUp: return adapters_.shrink(phase.layer, kGateUpMatrix, task, normed_.rows);
            case kShrinkDown: return adapters_.shrink(phase.layer, kDownMatrix, task, hidden_.rows);
            case kProjectQkv:
                return project({layer.qkv, layer.qkv_bias, phase.layer, kQkvMatrix}, normed_, task, thread, StoreTo<T>{qkv_});
            case kRotate:
                return attention_.rotate(phase.layer, task, plan_, slots, qkv_, layer.query_norm.data, layer.key_norm.data);
            case kAttend: return attention_.attend(phase.layer, task, plan_, slots, attended_.rows);
            case kQuantizeAttended:
                return over_tokens(
                    task, [&](int t) { attended_.quantize(form_of(layer.out), t, round16(width_), plan_.num_tokens()); });
            case kProjectOut:
                return project_to_hidden_states({layer.out, layer.out_bias, phase.layer, kOutMatrix}, attended_, task, thread);
            case kNormFfn: return over_tokens(task, [&](int t) { norm(t, layer.ffn_norm[0], layer.gate_up); });
            case kGateUp:
                return project({layer.gate_up, layer.gate_up_bias, phase.layer, kGateUpMatrix}, normed_, task, thread,
                               Gate<T>{hidden_.rows});
            case kQuantizeHidden:
                return over_tokens(
                    task, [&](int t) { hidden_.quantize(form_of(layer.down), t, round16(shape.hidden), plan_.num_tokens()); });
            case kProjectDown:
                return project_to_hidden_states({layer.down, layer.down_bias, phase.layer, kDownMatrix}, hidden_, task, thread);
            case kAddOut:
            case kAddDown: return over_tokens(task, [&](int t) { add_partials(t); });
            case kNormFinal: return norm_final(task);
            case kLogits: return projection_.run(weights_.head, last_, samples, task, thread, Logits{this});
            case kJoinLogits: return join_logits(task);
            case kSample: return sample(task, thread);
            case kShareEmbedding: return all_gather->gather(tokens * largest_part(shape.dim, shape.ranks) * sizeof(T));
            case kShareOut:
            case kShareDown: return all_gather->gather(tokens * partial_stride() * sizeof(float));
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
        std::fill(hidden_states_[t] + shape.dim, hidden_states_[t] + partial_stride(), T{});
        T* to = shape.ranks == 1 ? hidden_states_[t] : reinterpret_cast<T*>(all_gather->own_part()) + t * part;
        std::memcpy(static_cast<void*>(to), weights_.embedding.template as<T>() + id * part, part * sizeof(T));
    }

    void join_embedding(int t) {
        for (int rank = 0; rank < shape.ranks; rank++) {
            const Part part = columns_[rank];
            std::memcpy(static_cast<void*>(hidden_states_[t] + part.begin),
                        reinterpret_cast<const T*>(all_gather->part_of(rank)) + t * part.size, part.size * sizeof(T));
        }
    }

    // `next`: the layer that multiplies the result.
    void norm(int t, const T* weight, const Linear<T>& next) {
        rms_norm(hidden_states_[t], weight, shape.dim, shape.norm_eps, normed_[t]);
        normed_.quantize(form_of(next), t, round16(shape.dim), plan_.num_tokens());
    }

    void norm_final(int task) {
        for (int i = task * 16; i < std::min(plan_.num_samples(), task * 16 + 16); i++) {
            const T* states = hidden_states_[plan_.samples[i].token];
            rms_norm(states, weights_.final_norm[0], shape.dim, shape.norm_eps, last_[i]);
            last_.quantize(form_of(weights_.head), i, round16(shape.dim), plan_.num_samples());
        }
    }

    // Linear layers with their epilogues.

    // `bias` of all outputs, or null.
    struct Layered {
        const Linear<T>& w;
        Rows<T> bias;
        int layer;
        Matrix matrix;
    };

    template <class Epilogue>
    void project(const Layered& of, const Inputs<T>& x, int task, int thread, const Epilogue& epilogue) {
        const Adapters<T>* adapters = adapters_.used() ? &adapters_ : nullptr;
        if (of.bias.data || adapters)
            projection_.run(of.w, x, plan_.num_tokens(), task, thread,
                            Adjusted<T, Epilogue>{of.bias.data, adapters, of.layer, of.matrix, epilogue});
        else
            projection_.run(of.w, x, plan_.num_tokens(), task, thread, epilogue);
    }

    void project_to_hidden_states(Layered of, const Inputs<T>& x, int task, int thread) {
        if (shape.rank != 0) of.bias = {};  // rank 0's partial sum has the bias for all ranks
        if (shape.ranks == 1)
            project(of, x, task, thread, AddTo<T>{hidden_states_});
        else
            project(of, x, task, thread, Partial{this});
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
            for (int i = 0; i < width; i++) to[size_t(row) * vocab + tile * kTileOutputs + i] = widen(narrow_to<T>(out[i]));
        }
    };

    void add_partials(int t) {
        T* state = hidden_states_[t];
        for (int i = 0; i < shape.dim; i += kLanes) {
            Vec total = Vec{};
            for (int rank = 0; rank < shape.ranks; rank++)
                total += load(reinterpret_cast<const float*>(all_gather->part_of(rank)) + t * partial_stride() + i);
            store(state + i, load(state + i) + round_to<T>(total));
        }
    }

    void join_logits(int row) {
        for (int rank = 0; rank < shape.ranks; rank++) {
            const Part part = vocab_[rank];
            std::memcpy(logits.as<float>() + size_t(row) * shape.full_vocab + part.begin,
                        reinterpret_cast<const float*>(all_gather->part_of(rank)) + size_t(row) * part.size,
                        part.size * sizeof(float));
        }
    }

    // Rank 0 samples for all ranks: ranks on different CPUs may differ in the last bit of a logit.

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
        if (shape.rank == 0) std::memcpy(all_gather->own_part(), sampled_, bytes);
        all_gather->gather(bytes);
        std::memcpy(sampled_, all_gather->part_of(0), bytes);
    }

    const int width_;                    // of all heads of this rank
    std::vector<Part> columns_, vocab_;  // of each rank: columns of the embedding, outputs of the head
    Team team_;
    RankWeights<T> weights_;
    Projection<T> projection_;
    AttentionLayer<T> attention_;
    Adapters<T> adapters_;
    Activations<T> hidden_states_, qkv_;
    Inputs<T> normed_, attended_, hidden_, last_;
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
