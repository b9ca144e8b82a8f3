// One rank's Transformer on CPU cores: a step of rows of any lengths, from token ids to sampled tokens, in one call.
//
// A step is a program of phases (threads.hpp) over buffers that were allocated at the start. Names and formulas are those of
// llama_core/execution/reference/model.py, which computes the same with torch. Every intermediate result is rounded to the
// model's type where the reference rounds it.
//
// Glossary of what a phase is cut into:
//   register tile   what one AMX tile register holds: 16 rows of 64 bytes
//   output tile     32 outputs of a linear layer, packed together; half of it is one register tile wide
//   task tile       the output tiles that one task of a linear layer computes
//   row panel       the rows of activations that one task of a linear layer computes
//   K slice         the part of an output tile's inputs that goes over a row panel at a time
//   query tile      up to 16 tokens of a row, whose attention is one task for each key/value head
//   KV tile         the keys, or the values, of 16 positions under one head
//   epilogue        what is done with the results of a linear layer while they are in the cache

#include <memory>
#include <stdexcept>
#include <string>

#include "all_gather.hpp"
#include "attention.hpp"
#include "linear.hpp"
#include "sampling.hpp"
#include "threads.hpp"

namespace llama {

// Shapes of this rank. `heads`, `kv_heads`, `hidden`, `vocab` are this rank's part, `dim` and `full_vocab` are whole.
// `max_tokens` and `max_samples` are those of one step.
// clang-format off
#define LLAMA_SHAPE(field)                                                                                                    \
    field(int32_t, dim) field(int32_t, layers) field(int32_t, heads) field(int32_t, kv_heads) field(int32_t, head_dim)        \
    field(int32_t, hidden) field(int32_t, vocab) field(int32_t, full_vocab) field(int32_t, rank) field(int32_t, ranks)        \
    field(int32_t, bfloat16) field(int32_t, int8_weights) field(int32_t, max_tokens) field(int32_t, max_samples)                \
    field(int32_t, max_seq_len) field(int32_t, block_size) field(int32_t, blocks_per_sequence) field(int32_t, threads)        \
    field(float, norm_eps)
// clang-format on
LLAMA_DEFINE_STRUCT(Shape, LLAMA_SHAPE)

// The arrays of llama_core/execution/slots.py's SlotTable, indexed by slot, which Python fills and steps read. tokens:
// [slots][max_seq_len], where sampled tokens are written; block_tables: [slots][blocks_per_sequence]; sampling: [slots].
#define LLAMA_SLOTS(field) field(int64_t*, tokens) field(const int64_t*, block_tables) field(const SlotSampling*, sampling)
LLAMA_DEFINE_STRUCT(Slots, LLAMA_SLOTS)

// Tokens start .. start + length of a slot. After each of the last `samples` of them a token is sampled.
#define LLAMA_ROW(field) field(int32_t, slot) field(int32_t, start) field(int32_t, length) field(int32_t, samples)
LLAMA_DEFINE_STRUCT(Row, LLAMA_ROW)

// A checkpoint's weights by their names in it.
// clang-format off
#define LLAMA_WEIGHTS(entry)                                                                                                  \
    entry(kEmbedding, "tok_embeddings") entry(kQuery, "attention.wq") entry(kKey, "attention.wk")                             \
    entry(kValue, "attention.wv") entry(kOut, "attention.wo") entry(kGate, "feed_forward.w1")                                 \
    entry(kDown, "feed_forward.w2") entry(kUp, "feed_forward.w3") entry(kAttentionNorm, "attention_norm")                     \
    entry(kFfnNorm, "ffn_norm") entry(kFinalNorm, "norm") entry(kHead, "output")
// clang-format on
enum Weight { LLAMA_WEIGHTS(LLAMA_ENUMERATOR) };

// The phases of a step, by the names under which their seconds are reported.
// clang-format off
#define LLAMA_OPS(entry)                                                                                                      \
    entry(kEmbed, "embed") entry(kShareEmbedding, "share embedding") entry(kJoinEmbedding, "join embedding")                  \
    entry(kNormAttention, "norm before attention") entry(kProjectQkv, "project q, k, v")                                      \
    entry(kRotate, "rotate, write cache") entry(kAttend, "attend") entry(kQuantizeAttended, "quantize attended")              \
    entry(kProjectOut, "project out") entry(kShareOut, "share out") entry(kAddOut, "add out")                                 \
    entry(kNormFfn, "norm before ffn") entry(kGateUp, "gate and up") entry(kQuantizeHidden, "quantize hidden")                \
    entry(kProjectDown, "project down") entry(kShareDown, "share down") entry(kAddDown, "add down")                           \
    entry(kNormFinal, "norm at the end") entry(kLogits, "logits") entry(kShareLogits, "share logits")                         \
    entry(kJoinLogits, "join logits") entry(kSample, "sample") entry(kShareSampled, "share sampled")
// clang-format on
enum Op { LLAMA_OPS(LLAMA_ENUMERATOR) kPack, kNumOps };

// One line for each struct and table, as backend.py's _description writes them.
inline std::string describe_abi() {
    std::string text = describe_Shape() + "\n" + describe_Slots() + "\n" + describe_SlotSampling() + "\n" + describe_Row();
    text += "\nWeight";
    LLAMA_WEIGHTS(LLAMA_DESCRIBE_ENTRY)
    text += "\nOp";
    LLAMA_OPS(LLAMA_DESCRIBE_ENTRY)
    return text;
}

class Engine : public Tasks {
  public:
    explicit Engine(const Shape& shape) : shape(shape) {}
    virtual void pack_weight(int weight, int layer, const void* source, bool source_is_bfloat16) = 0;
    virtual void make_cache(int blocks) = 0;
    virtual void step(const Row* rows, int num_rows, int64_t* sampled, bool logits_everywhere) = 0;
    virtual void poke_embedding(int token, const float* values) = 0;
    virtual void logits_of(const int32_t* tokens, int count) = 0;

    const Shape shape;
    Slots slots{};
    Memory logits;  // float [max_samples][full_vocab]
    std::unique_ptr<AllGather> all_gather;
    double seconds[kNumOps] = {};  // spent in each op, since the start
    size_t weight_bytes = 0, working_bytes = 0;
};

template <class T>
class Transformer : public Engine {
  public:
    Transformer(const Shape& shape, const std::vector<int>& cpus, const float* rotary)
        : Engine(shape),
          head_dim_(int(round_up(shape.head_dim, kLanes))),
          width_(shape.heads * shape.head_dim),
          team_(shape.threads, cpus) {
        const Shape& s = shape;
        const Format format = s.int8_weights ? Format::kInt8 : s.bfloat16 ? Format::kBFloat16 : Format::kFloat32;
        const int kv_width = s.kv_heads * s.head_dim;
        embedding_ = Memory(size_t(s.full_vocab) * (s.dim / s.ranks) * sizeof(T));
        for (int i = 0; i < s.layers; i++) {
            Layer& layer = layers_.emplace_back();
            layer.qkv = Linear(format, width_ + 2 * kv_width, s.dim);
            layer.out = Linear(format, s.dim, width_);
            layer.gate_up = Linear(format, int(round_up(s.hidden, 16)) * 2, s.dim);
            layer.down = Linear(format, s.dim, s.hidden);
            layer.attention_norm = Activations<T>(1, s.dim);
            layer.ffn_norm = Activations<T>(1, s.dim);
            weight_bytes += layer.qkv.bytes() + layer.out.bytes() + layer.gate_up.bytes() + layer.down.bytes();
        }
        final_norm_ = Activations<T>(1, s.dim);
        head_ = Linear(format, s.vocab, s.dim);
        weight_bytes += embedding_.bytes() + head_.bytes();

        const size_t t = s.max_tokens;
        hidden_states_ = Activations<T>(t, s.dim);
        normed_ = Activations<T>(t, s.dim);
        qkv_ = Activations<T>(t, width_ + 2 * kv_width);
        queries_ = Activations<T>(t, size_t(s.heads) * head_dim_);
        attended_ = Activations<T>(t, width_);
        hidden_ = Activations<T>(t, s.hidden);
        last_ = Activations<T>(s.max_samples, s.dim);
        if (s.int8_weights) {
            quantized_ = Quantized(t, s.dim);
            quantized_attended_ = Quantized(t, width_);
            quantized_hidden_ = Quantized(t, s.hidden);
            quantized_last_ = Quantized(s.max_samples, s.dim);
        }
        logits = Memory(size_t(s.max_samples) * s.full_vocab * 4);
        working_bytes = hidden_states_.bytes() + normed_.bytes() + qkv_.bytes() + queries_.bytes() + attended_.bytes() +
                        hidden_.bytes() + last_.bytes() + quantized_.bytes() + quantized_attended_.bytes() +
                        quantized_hidden_.bytes() + quantized_last_.bytes() + logits.bytes();
        make_rotary(rotary);
        if (in_row_panels(t)) {
            const size_t sums = size_t(kMaxTilesPerTask) * kRowPanel * kTileOutputs * 4 * (s.int8_weights ? 2 : 1);
            for (int i = 0; i < s.threads; i++) row_panel_sums_.emplace_back(sums), working_bytes += sums;
        }
        for (int i = 0; i < s.threads; i++) samplers_.emplace_back(int(round_up(s.full_vocab, kLanes)));
        // Reserved, so that no step allocates: a step cannot report that it failed to.
        tokens_.reserve(t), rows_.reserve(t), query_tiles_.reserve(t), samples_.reserve(std::max<size_t>(t, s.max_samples));
        program_.reserve(16 * (s.layers + 2));
    }

    void make_cache(int blocks) override {
        cache_ = Cache<T>(shape.layers, blocks, shape.block_size, shape.kv_heads, head_dim_);
    }

    // `source`: this rank's part of the weight as the checkpoint has it, [outputs][inputs].
    void pack_weight(int weight, int layer, const void* source, bool source_is_bfloat16) override {
        packing_ = {weight, layer, source, source_is_bfloat16};
        team_.run(*this, {{kPack, layer, (rows_of(weight) + 15) / 16}});
    }

    void poke_embedding(int token, const float* values) override {
        for (size_t i = 0; i < part_dim(); i++) embedding_.as<T>()[token * part_dim() + i] = narrow_to<T>(values[i]);
    }

    // Runs `rows`. `sampled`: the rows' tokens in order, or -1 where the logits are not finite.
    void step(const Row* rows, int num_rows, int64_t* sampled, bool logits_everywhere) override {
        rows_.assign(rows, rows + num_rows);
        plan_tokens();
        sampled_ = sampled;
        join_logits_ = shape.rank == 0 || logits_everywhere;
        program_.clear();
        const int blocks = (num_tokens() + 15) / 16;
        const bool shared = shape.ranks > 1;
        add(kEmbed, 0, blocks);
        add(kShareEmbedding, 0, shared);
        add(kJoinEmbedding, 0, shared * blocks);
        for (int i = 0; i < shape.layers; i++) {
            const Layer& layer = layers_[i];
            add(kNormAttention, i, blocks);
            add(kProjectQkv, i, tasks_of(layer.qkv, num_tokens()));
            add(kRotate, i, blocks);
            add(kAttend, i, int(query_tiles_.size()) * ((shape.kv_heads + heads_of_task_ - 1) / heads_of_task_));
            add(kQuantizeAttended, i, shape.int8_weights * blocks);
            add(kProjectOut, i, tasks_of(layer.out, num_tokens()));
            add(kShareOut, i, shared);
            add(kAddOut, i, shared * blocks);
            add(kNormFfn, i, blocks);
            add(kGateUp, i, tasks_of(layer.gate_up, num_tokens()));
            add(kQuantizeHidden, i, shape.int8_weights * blocks);
            add(kProjectDown, i, tasks_of(layer.down, num_tokens()));
            add(kShareDown, i, shared);
            add(kAddDown, i, shared * blocks);
        }
        add_head();
        const int samples = int(samples_.size());
        add(kSample, 0, shape.rank == 0 ? samples : 0);
        add(kShareSampled, 0, shared && samples);
        run();
        if (all_gather && all_gather->failed()) return;
        for (int i = 0; i < samples; i++)
            slots.tokens[size_t(samples_[i].slot) * shape.max_seq_len + samples_[i].position] =
                std::max<int64_t>(sampled[i], 0);
    }

    // Logits of `tokens` of the latest step, counted from its first: into `logits`, on every rank.
    void logits_of(const int32_t* tokens, int count) override {
        samples_.clear();
        for (int i = 0; i < count; i++) samples_.push_back({tokens[i], 0, 0});
        join_logits_ = true;
        program_.clear();
        add_head();
        run();
    }

    void run(const Phase& phase, int task, int thread) override {
        switch (phase.op) {
            case kEmbed: return over_tokens(task, [&](int t) { embed(t); });
            case kJoinEmbedding: return over_tokens(task, [&](int t) { join_embedding(t); });
            case kNormAttention:
                return over_tokens(task, [&](int t) { norm(hidden_states_[t], t, layers_[phase.layer].attention_norm); });
            case kProjectQkv:
                return project(layers_[phase.layer].qkv, normed_, quantized_, num_tokens(), task, thread, StoreTo{qkv_});
            case kRotate: return rotate(phase.layer, task);
            case kAttend: return attend(phase.layer, task);
            case kQuantizeAttended:
                return over_tokens(task, [&](int t) { quantized_attended_.quantize(attended_[t], t, round16(width_)); });
            case kProjectOut:
                return project_to_hidden_states(layers_[phase.layer].out, attended_, quantized_attended_, task, thread);
            case kNormFfn: return over_tokens(task, [&](int t) { norm(hidden_states_[t], t, layers_[phase.layer].ffn_norm); });
            case kGateUp:
                return project(layers_[phase.layer].gate_up, normed_, quantized_, num_tokens(), task, thread, Gate{this});
            case kQuantizeHidden:
                return over_tokens(task, [&](int t) { quantized_hidden_.quantize(hidden_[t], t, round16(shape.hidden)); });
            case kProjectDown:
                return project_to_hidden_states(layers_[phase.layer].down, hidden_, quantized_hidden_, task, thread);
            case kAddOut:
            case kAddDown: return over_tokens(task, [&](int t) { add_partials(t); });
            case kNormFinal: return norm_final(task);
            case kLogits: return project(head_, last_, quantized_last_, int(samples_.size()), task, thread, Logits{this});
            case kJoinLogits: return join_logits(task);
            case kSample: return sample(task, thread);
            case kShareEmbedding: return all_gather->gather(num_tokens() * part_dim() * sizeof(T));
            case kShareOut:
            case kShareDown: return all_gather->gather(num_tokens() * partial_stride() * sizeof(float));
            case kShareLogits: return all_gather->gather(samples_.size() * shape.vocab * sizeof(float));
            case kShareSampled: return share_sampled();
            case kPack: return pack_rows(task);
        }
    }

    // Other libraries set the shapes of the tile registers too, so every program sets them again.
    void enter() override { use_tiles(); }
    void leave() override { release_tiles(); }

    void ended(const Phase& phase) override {
        const double now = seconds_now();
        seconds[phase.op] += now - phase_began_;
        phase_began_ = now;
    }

  private:
    struct Layer {
        Linear qkv, out, gate_up, down;  // gate_up: 16 outputs of the gate, then the same 16 of up, and so on
        Activations<T> attention_norm, ffn_norm;
    };
    struct Token {
        int slot, position;
        bool ends_new_kv_tile;  // the row's last token, in a KV tile that the row begins
    };
    // See the glossary.
    struct QueryTile {
        int slot, begin, end;  // tokens begin .. end of the step
    };
    struct Sample {
        int token, slot, position;  // after `token` of the step, for `position`
    };
    struct Packing {
        int weight, layer;
        const void* source;
        bool source_is_bfloat16;
    };

    static int round16(int n) { return int(round_up(n, 16)); }
    int num_tokens() const { return int(tokens_.size()); }
    size_t part_dim() const { return shape.dim / shape.ranks; }
    size_t partial_stride() const { return round_up(shape.dim, kTileOutputs); }

    // Many rows of x are cut into parts that stay in a core's cache while the weights are read.
    static constexpr size_t kPartBytes = 1 << 20;
    static int part_rows(const Linear& w) {
        const size_t row = w.inputs() * (w.format() == Format::kInt8 ? 2 : sizeof(T));
        return int(std::clamp<size_t>(kPartBytes / row / kMaxRows * kMaxRows, 2 * kMaxRows, 512));
    }

    // Memory is too slow for the tile registers unless their operands lie in the first-level cache: one K slice of an output
    // tile is multiplied with all rows of a panel, and then the next slice is.
    static constexpr int kKSliceBytes = 16384;  // of an output tile's weights
    static constexpr int kRowPanel = 512;
    static constexpr int kMaxTilesPerTask = 8;  // so that rows are read from memory once for all of them
#if defined(LLAMA_AMX)
    static constexpr bool kTilesOfT = sizeof(T) == 2;
#else
    static constexpr bool kTilesOfT = false;
#endif
    bool in_row_panels(int rows) const { return kTilesOfT && rows > 2 * kMaxRows; }
    // With fewer output tiles in a task, slices save less than it costs to read the rows again.
    bool in_k_slices(const Linear& w) const { return tiles_per_task(w) >= kMaxTilesPerTask / 2; }
    int row_panel(const Linear& w) const { return in_k_slices(w) ? kRowPanel : part_rows(w); }
    int tiles_per_task(const Linear& w) const {
        return std::clamp(w.output_tiles() / (shape.threads * 4), 1, kMaxTilesPerTask);
    }
    int num_task_tiles(const Linear& w) const { return (w.output_tiles() + tiles_per_task(w) - 1) / tiles_per_task(w); }

    int tasks_of(const Linear& w, int rows) const {
        if (in_row_panels(rows)) return num_task_tiles(w) * ((rows + row_panel(w) - 1) / row_panel(w));
        return w.output_tiles() * ((rows + part_rows(w) - 1) / part_rows(w));
    }

    void add(Op op, int layer, int tasks) { program_.push_back({op, layer, tasks}); }

    void add_head() {
        const int samples = int(samples_.size());
        const bool shared = shape.ranks > 1 && samples;
        add(kNormFinal, 0, (samples + 15) / 16);
        add(kLogits, 0, tasks_of(head_, samples));
        add(kShareLogits, 0, shared);
        add(kJoinLogits, 0, shared && join_logits_ ? samples : 0);
    }

    void run() {
        phase_began_ = seconds_now();
        team_.run(*this, program_);
    }

    void plan_tokens() {
        tokens_.clear();
        samples_.clear();
        query_tiles_.clear();
        for (const Row& row : rows_) {
            const int first = num_tokens();
            for (int i = 0; i < row.length; i++) tokens_.push_back({row.slot, row.start + i, false});
            const int end = row.start + row.length - 1;
            tokens_.back().ends_new_kv_tile = end / kKvTile * kKvTile >= row.start;
            for (int i = row.length - row.samples; i < row.length; i++)
                samples_.push_back({first + i, row.slot, row.start + i + 1});
            // The last query tile first: it attends to most positions, so it takes longest.
            for (int to = row.length; to > 0; to -= kQueryTile) {
                const int from = std::max(0, to - kQueryTile);
                query_tiles_.push_back({row.slot, first + from, first + to});
            }
        }
        // Several heads a task, so that the next head's keys are prefetched while this head's are used; as long as every thread has work.
        heads_of_task_ = std::clamp(int(query_tiles_.size()) * shape.kv_heads / (shape.threads * 8), 1, shape.kv_heads);
    }
    static constexpr int kQueryTile = 16;

    template <class F>
    void over_tokens(int task, F&& f) {
        for (int t = task * 16; t < std::min(num_tokens(), task * 16 + 16); t++) f(t);
    }

    // Weights.

    int rows_of(int weight) const {
        switch (weight) {
            case kEmbedding: return shape.full_vocab;
            case kQuery: return shape.heads * shape.head_dim;
            case kKey:
            case kValue: return shape.kv_heads * shape.head_dim;
            case kOut:
            case kDown: return shape.dim;
            case kGate:
            case kUp: return shape.hidden;
            case kHead: return shape.vocab;
            default: return 1;
        }
    }

    int columns_of(int weight) const {
        switch (weight) {
            case kEmbedding: return int(part_dim());
            case kOut: return width_;
            case kDown: return shape.hidden;
            default: return shape.dim;
        }
    }

    void pack_rows(int task) {
        const int rows = rows_of(packing_.weight), columns = columns_of(packing_.weight);
        for (int row = task * 16; row < std::min(rows, task * 16 + 16); row++)
            if (packing_.source_is_bfloat16)
                pack_row(static_cast<const bf16*>(packing_.source) + size_t(row) * columns, row, columns);
            else
                pack_row(static_cast<const float*>(packing_.source) + size_t(row) * columns, row, columns);
    }

    template <class S>
    void pack_row(const S* source, int row, int columns) {
        Layer& layer = layers_[packing_.layer];
        const int kv_width = shape.kv_heads * shape.head_dim;
        auto copy = [&](T* to) {
            for (int i = 0; i < columns; i++) to[i] = narrow_to<T>(widen(source[i]));
        };
        switch (packing_.weight) {
            case kEmbedding: return copy(embedding_.as<T>() + size_t(row) * columns);
            case kQuery: return layer.qkv.pack(source, row);
            case kKey: return layer.qkv.pack(source, width_ + row);
            case kValue: return layer.qkv.pack(source, width_ + kv_width + row);
            case kOut: return layer.out.pack(source, row);
            case kGate: return layer.gate_up.pack(source, row / 16 * 32 + row % 16);
            case kUp: return layer.gate_up.pack(source, row / 16 * 32 + 16 + row % 16);
            case kDown: return layer.down.pack(source, row);
            case kAttentionNorm: return copy(layer.attention_norm[0]);
            case kFfnNorm: return copy(layer.ffn_norm[0]);
            case kFinalNorm: return copy(final_norm_[0]);
            case kHead: return head_.pack(source, row);
        }
    }

    // Embedding. Each rank has some of the columns.

    void embed(int t) {
        const Token& token = tokens_[t];
        const int64_t id = slots.tokens[size_t(token.slot) * shape.max_seq_len + token.position];
        // Whole vectors read beyond the width, so these columns are zeroed: a value that was not finite would remain there.
        std::fill(hidden_states_[t] + shape.dim, hidden_states_[t] + partial_stride(), T{});
        T* to = shape.ranks == 1 ? hidden_states_[t] : reinterpret_cast<T*>(all_gather->mine()) + t * part_dim();
        std::memcpy(static_cast<void*>(to), embedding_.as<T>() + id * part_dim(), part_dim() * sizeof(T));
    }

    void join_embedding(int t) {
        for (int rank = 0; rank < shape.ranks; rank++)
            std::memcpy(static_cast<void*>(hidden_states_[t] + rank * part_dim()),
                        reinterpret_cast<const T*>(all_gather->of(rank)) + t * part_dim(), part_dim() * sizeof(T));
    }

    // RMSNorm: x / sqrt(mean(x^2) + eps) * weight.

    void norm_to(const T* x, const T* weight, T* to) const {
        Vec squares = Vec{};
        for (int i = 0; i < shape.dim; i += kLanes) {
            Vec v = load(x + i);
            squares = fma(v, v, squares);
        }
        const Vec inverse = splat(1.0f / std::sqrt(sum(squares) / shape.dim + shape.norm_eps));
        for (int i = 0; i < shape.dim; i += kLanes) store(to + i, round_to<T>(load(x + i) * inverse) * load(weight + i));
    }

    void norm(const T* x, int t, const Activations<T>& weight) {
        norm_to(x, weight[0], normed_[t]);
        if (shape.int8_weights) quantized_.quantize(normed_[t], t, round16(shape.dim));
    }

    void norm_final(int task) {
        for (int i = task * 16; i < std::min(int(samples_.size()), task * 16 + 16); i++) {
            norm_to(hidden_states_[samples_[i].token], final_norm_[0], last_[i]);
            if (shape.int8_weights) quantized_last_.quantize(last_[i], i, round16(shape.dim));
        }
    }

    // Linear layers with their epilogues, which take `out` [rows][kTileOutputs] of output tile `tile`.

    template <class Epilogue>
    void project(const Linear& w, const Rows<T>& x, const Quantized& q, int rows, int task, int thread,
                 const Epilogue& epilogue) {
#if defined(LLAMA_AMX)
        if constexpr (kTilesOfT) {
            if (in_row_panels(rows)) {
                if (shape.int8_weights)
                    return project_row_panel(w, q, rows, task, thread, epilogue);
                else
                    return project_row_panel(w, x, rows, task, thread, epilogue);
            }
        }
#endif
        alignas(64) float out[kMaxRows * kTileOutputs];
        const int tile = task % w.output_tiles(), part = task / w.output_tiles();
        const int begin = part * part_rows(w), end = std::min(rows, begin + part_rows(w));
        for (int row = begin; row < end; row += kMaxRows) {
            const int count = std::min(kMaxRows, end - row);
            if (shape.int8_weights)
                w.block(q, row, count, tile, row == begin, out);
            else
                w.block(x, row, count, tile, row == begin, out);
            for (int r = 0; r < count; r++) epilogue(row + r, tile, out + r * kTileOutputs);
        }
    }

#if defined(LLAMA_AMX)
    template <class X, class Epilogue>
    void project_row_panel(const Linear& w, const X& x, int rows, int task, int thread, const Epilogue& epilogue) {
        const int begin = task / num_task_tiles(w) * row_panel(w), end = std::min(rows, begin + row_panel(w));
        const int first = task % num_task_tiles(w) * tiles_per_task(w),
                  last = std::min(w.output_tiles(), first + tiles_per_task(w));
        const size_t blocks = (end - begin + kMaxRows - 1) / kMaxRows, input_bytes = w.output_tile_bytes() / w.padded();
        const size_t k_slice = in_k_slices(w) ? kKSliceBytes / input_bytes : w.padded();
        const size_t share = round_up(k_slice * input_bytes / blocks, 64), block_bytes = w.sums_bytes();
        alignas(64) float out[kMaxRows * kTileOutputs];
        auto sums = [&](int tile, int row) {
            return row_panel_sums_[thread].template as<char>() +
                   ((tile - first) * (kRowPanel / kMaxRows) + (row - begin) / kMaxRows) * block_bytes;
        };
        auto epilogue_all = [&](int row, int count, int tile, const float* results) {
            for (int r = 0; r < count; r++) epilogue(row + r, tile, results + r * kTileOutputs);
        };
        for (size_t from = 0; from < w.padded(); from += k_slice)
            for (int tile = first; tile < last; tile++) {
                // Prefetch the weights after these while these are used.
                const char* ahead = tile + 1 < last ? w.output_tile(tile + 1) + from * input_bytes
                                                    : w.output_tile(first) + (from + k_slice) * input_bytes;
                for (int row = begin; row < end; row += kMaxRows, ahead += share) {
                    const int count = std::min(kMaxRows, end - row);
                    for (size_t line = 0; line < share; line += 64) __builtin_prefetch(ahead + line, 0, 2);
                    if (in_k_slices(w)) {
                        w.add_k_slice(x, row, count, tile, false, from, std::min(w.padded(), from + k_slice), sums(tile, row));
                    } else {
                        w.block(x, row, count, tile, false, out);
                        epilogue_all(row, count, tile, out);
                    }
                }
            }
        if (!in_k_slices(w)) return;
        for (int row = begin; row < end; row += kMaxRows)
            for (int tile = first; tile < last; tile++) {
                const int count = std::min(kMaxRows, end - row);
                epilogue_all(row, count, tile, w.finish(x, row, count, tile, sums(tile, row), out));
            }
    }
#endif

    struct StoreTo {
        const Rows<T>& to;
        void operator()(int row, int tile, const float* out) const {
            for (int i = 0; i < kTileOutputs; i += kLanes) store(to[row] + tile * kTileOutputs + i, load(out + i));
        }
    };
    struct AddToHiddenStates {
        Transformer* self;
        void operator()(int row, int tile, const float* out) const {
            T* state = self->hidden_states_[row] + tile * kTileOutputs;
            for (int i = 0; i < kTileOutputs; i += kLanes) store(state + i, load(state + i) + round_to<T>(load(out + i)));
        }
    };
    struct Partial {
        Transformer* self;
        void operator()(int row, int tile, const float* out) const {
            std::memcpy(reinterpret_cast<float*>(self->all_gather->mine()) + row * self->partial_stride() + tile * kTileOutputs,
                        out, kTileOutputs * 4);
        }
    };
    // SwiGLU: silu(gate) * up.
    struct Gate {
        Transformer* self;
        void operator()(int row, int tile, const float* out) const {
            Vec gate = round_to<T>(load(out)), up = round_to<T>(load(out + 16));
            Vec silu = round_to<T>(gate * reciprocal(splat(1.0f) + exp(-gate)));
            store(self->hidden_[row] + tile * 16, silu * up);
        }
    };
    struct Logits {
        Transformer* self;
        void operator()(int row, int tile, const float* out) const {
            const Shape& s = self->shape;
            float* to = s.ranks == 1 ? self->logits.template as<float>() : reinterpret_cast<float*>(self->all_gather->mine());
            const int width = std::min(kTileOutputs, s.vocab - tile * kTileOutputs);
            for (int i = 0; i < width; i++) to[size_t(row) * s.vocab + tile * kTileOutputs + i] = widen(narrow_to<T>(out[i]));
        }
    };

    void project_to_hidden_states(const Linear& w, const Rows<T>& x, const Quantized& q, int task, int thread) {
        if (shape.ranks == 1)
            project(w, x, q, num_tokens(), task, thread, AddToHiddenStates{this});
        else
            project(w, x, q, num_tokens(), task, thread, Partial{this});
    }

    void add_partials(int t) {
        T* state = hidden_states_[t];
        for (int i = 0; i < shape.dim; i += kLanes) {
            Vec total = Vec{};
            for (int rank = 0; rank < shape.ranks; rank++)
                total += load(reinterpret_cast<const float*>(all_gather->of(rank)) + t * partial_stride() + i);
            store(state + i, load(state + i) + round_to<T>(total));
        }
    }

    void join_logits(int row) {
        for (int rank = 0; rank < shape.ranks; rank++)
            std::memcpy(logits.as<float>() + size_t(row) * shape.full_vocab + rank * shape.vocab,
                        reinterpret_cast<const float*>(all_gather->of(rank)) + size_t(row) * shape.vocab,
                        shape.vocab * sizeof(float));
    }

    // Rotary embedding of adjacent pairs, keys and values into the cache.

    // cos of each position's angles, each twice; then sin likewise, negated at even indices: float [max_seq_len][2][head_dim].
    void make_rotary(const float* table) {
        rotary_ = Memory(size_t(shape.max_seq_len) * 2 * head_dim_ * 4);
        working_bytes += rotary_.bytes();
        for (int p = 0; p < shape.max_seq_len; p++) {
            float* to = rotary_of(p);
            for (int i = 0; i < shape.head_dim; i++) {
                const float* pair = table + (size_t(p) * (shape.head_dim / 2) + i / 2) * 2;
                to[i] = pair[0];
                to[head_dim_ + i] = i % 2 ? pair[1] : -pair[1];
            }
        }
    }
    float* rotary_of(int position) const { return rotary_.as<float>() + size_t(position) * 2 * head_dim_; }

    void rotate_head(const T* x, const float* rotary, T* to) const {
        for (int i = 0; i < head_dim_; i += kLanes) {
            Vec v = load(x + i);
            Vec other = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
            store(to + i, fma(v, load(rotary + i), other * load(rotary + head_dim_ + i)));
        }
    }

    void rotate(int layer, int task) {
        const int begin = task * 16, end = std::min(num_tokens(), begin + 16);
        for (int t = begin; t < end; t++)
            for (int h = 0; h < shape.heads; h++)
                rotate_head(qkv_[t] + h * shape.head_dim, rotary_of(tokens_[t].position), queries_[t] + h * head_dim_);
        alignas(64) T key[kernels::kMaxHeadDim];
        for (int h = 0; h < shape.kv_heads; h++)
            for (int t = begin; t < end; t++) {
                const T* k = qkv_[t] + width_ + h * shape.head_dim;
                const T* v = k + shape.kv_heads * shape.head_dim;
                rotate_head(k, rotary_of(tokens_[t].position), key);
                cache_.write(layer, h, block_table_of(tokens_[t].slot), tokens_[t].position, key, v);
                if (tokens_[t].ends_new_kv_tile)
                    cache_.clear_behind(layer, h, block_table_of(tokens_[t].slot), tokens_[t].position);
            }
    }
    const int64_t* block_table_of(int slot) const { return slots.block_tables + size_t(slot) * shape.blocks_per_sequence; }

    void attend(int layer, int task) {
        const int tasks = (shape.kv_heads + heads_of_task_ - 1) / heads_of_task_;
        const int begin = task % tasks * heads_of_task_, end = std::min(shape.kv_heads, begin + heads_of_task_);
        const QueryTile& query_tile = query_tiles_[task / tasks];
        const kernels::AttentionTiles tiles((query_tile.end - query_tile.begin) * (shape.heads / shape.kv_heads));
        for (int kv_head = begin; kv_head < end; kv_head++)
            attend_head(query_tile, {layer, kv_head, kv_head + 1 < end ? kv_head + 1 : -1, block_table_of(query_tile.slot)});
    }

    void attend_head(const QueryTile& query_tile, const kernels::Source& from) {
        const int group = shape.heads / shape.kv_heads;
        const float scale = 1.0f / std::sqrt(float(shape.head_dim));
        const bool direct = head_dim_ == shape.head_dim;
        alignas(64) T spare[kBatch][kernels::kMaxHeadDim];
        Query<T> queries[kBatch];
        const int count = (query_tile.end - query_tile.begin) * group;
        for (int first = 0; first < count; first += kBatch) {
            const int num = std::min(kBatch, count - first);
            for (int i = 0; i < num; i++) {
                const int t = query_tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                T* out = attended_[t] + head * shape.head_dim;
                queries[i] = {queries_[t] + head * head_dim_, direct ? out : spare[i], tokens_[t].position};
            }
            kernels::attend_all(queries, num, cache_, from, head_dim_, scale);
            for (int i = 0; i < num && !direct; i++) {
                const int t = query_tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                std::memcpy(static_cast<void*>(attended_[t] + head * shape.head_dim), spare[i], shape.head_dim * sizeof(T));
            }
        }
    }
    static constexpr int kBatch = 16;  // queries that are multiplied with the keys together

    // Rank 0 samples for all: ranks with different CPUs may differ in the last bit of a logit.

    void sample(int i, int thread) {
        const Sample& d = samples_[i];
        const float* row = logits.as<float>() + size_t(i) * shape.full_vocab;
        sampled_[i] = samplers_[thread].sample(row, shape.full_vocab, slots.sampling[d.slot], d.position);
    }

    void share_sampled() {
        const size_t bytes = samples_.size() * sizeof(int64_t);
        if (shape.rank == 0) std::memcpy(all_gather->mine(), sampled_, bytes);
        all_gather->gather(bytes);
        std::memcpy(sampled_, all_gather->of(0), bytes);
    }

    const int head_dim_;  // padded to whole vectors
    const int width_;     // of all heads of this rank
    Team team_;
    Memory embedding_, rotary_;
    std::vector<Layer> layers_;
    Activations<T> final_norm_;
    Linear head_;
    Cache<T> cache_;
    Activations<T> hidden_states_, normed_, qkv_, queries_, attended_, hidden_, last_;
    Quantized quantized_, quantized_attended_, quantized_hidden_, quantized_last_;
    std::vector<Memory> row_panel_sums_;  // of each thread: sums of a row panel
    std::vector<Sampler> samplers_;       // one for each thread

    // The step in flight.
    std::vector<Row> rows_;
    std::vector<Token> tokens_;
    std::vector<QueryTile> query_tiles_;
    std::vector<Sample> samples_;
    std::vector<Phase> program_;
    int64_t* sampled_ = nullptr;
    bool join_logits_ = false;
    int heads_of_task_ = 1;
    double phase_began_ = 0;
    Packing packing_{};
};

}  // namespace llama

// The C interface for backend.py. Pointers are kept only where a comment says so. No exception leaves it.

using namespace llama;

extern "C" {

// The layout of every struct and the names of every table that the caller mirrors.
const char* llama_abi() {
    static const std::string description = describe_abi();
    return description.c_str();
}

// The reason why this process cannot compute such a model, or null.
const char* llama_unsupported_reason(int head_dim, int widest, int int8_weights) {
    if (!allow_tiles()) return "the kernel refuses the AMX registers that this CPU was compiled for";
    if (head_dim > kernels::kMaxHeadDim) return "head_dim is over 512";
    if (int8_weights && widest > 66'000) return "sums of so many int8 products would not fit into 32 bits";
    return nullptr;
}

// `rotary` float [max_seq_len][head_dim / 2][2] is read now; `cpus` [threads] or null. Returns null if the system has no memory or no
// threads left. To be called where llama_unsupported_reason returns null.
Engine* llama_create(const Shape* shape, const Slots* slots, const float* rotary, const int32_t* cpus) try {
    std::vector<int> pins(cpus ? cpus : nullptr, cpus ? cpus + shape->threads : nullptr);
    Engine* engine;
    if (shape->bfloat16)
        engine = new Transformer<bf16>(*shape, pins, rotary);
    else
        engine = new Transformer<float>(*shape, pins, rotary);
    engine->slots = *slots;
    return engine;
} catch (const std::exception&) {
    return nullptr;
}

void llama_destroy(Engine* engine) { delete engine; }

void llama_pack(Engine* engine, int weight, int layer, const void* source, int source_is_bfloat16) {
    engine->pack_weight(weight, layer, source, source_is_bfloat16);
}

int llama_make_cache(Engine* engine, int blocks) try {
    engine->make_cache(blocks);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

size_t llama_gather_bytes(const Shape* s) {
    const size_t sums = size_t(s->max_tokens) * round_up(s->dim, kTileOutputs) * 4,
                 logits = size_t(s->max_samples) * s->vocab * 4;
    return std::max(sums, logits);
}

size_t llama_shared_bytes(const Shape* s) { return SharedMemoryAllGather::size_for(s->ranks, llama_gather_bytes(s)); }

// `memory` is kept.
void llama_share_memory(Engine* engine, char* memory) {
    const Shape& s = engine->shape;
    engine->all_gather = std::make_unique<SharedMemoryAllGather>(memory, s.rank, s.ranks, llama_gather_bytes(&s));
}

void llama_use_fallback(Engine* engine, GatherFunction gather) {
    engine->all_gather = std::make_unique<FallbackAllGather>(gather, engine->shape.ranks, llama_gather_bytes(&engine->shape));
}

// Returns 1 if an all-gather between the ranks failed. The caller checks all bounds; nothing is checked here.
int llama_step(Engine* engine, const Row* rows, int num_rows, int64_t* sampled, int logits_everywhere) {
    engine->step(rows, num_rows, sampled, logits_everywhere);
    return engine->all_gather && engine->all_gather->failed();
}

void llama_logits_of(Engine* engine, const int32_t* tokens, int count) { engine->logits_of(tokens, count); }

// Overwrites a token's embedding, float [dim / ranks]: for tests of values that are not finite.
void llama_poke_embedding(Engine* engine, int token, const float* values) { engine->poke_embedding(token, values); }

const char* llama_instructions() {
#if defined(LLAMA_AMX)
    return "AMX";
#elif defined(__AVX512BF16__)
    return "AVX-512 with bfloat16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "plain vectors";
#endif
}

float* llama_logits(Engine* engine) { return engine->logits.as<float>(); }
const double* llama_seconds(Engine* engine) { return engine->seconds; }
double llama_waited(Engine* engine) { return engine->all_gather ? engine->all_gather->waited() : 0.0; }
size_t llama_weight_bytes(Engine* engine) { return engine->weight_bytes; }
size_t llama_working_bytes(Engine* engine) { return engine->working_bytes; }

}  // extern "C"
