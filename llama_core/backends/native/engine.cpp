// The C interface for llama_core/backends/native/library.py. Pointers are kept only where a comment says so. No exception
// leaves it.

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "layers/transformer.hpp"
#include "weight_formats.hpp"

using namespace llama;

namespace {

template <class T>
Engine* create(const Shape& shape, const std::vector<Tensor>& tensors, const char* const* formats,
               const std::vector<WeightPart>& modules, const std::vector<Operation>& operations, const std::vector<int>& cpus,
               const float* rotary) {
    std::vector<const WeightFormat<T>*> found;
    for (size_t i = 0; i < tensors.size(); i++) found.push_back(formats[i] ? WeightFormats::find<T>(formats[i]) : nullptr);
    return new Transformer<T>(shape, tensors, found, modules, operations, cpus, rotary);
}

template <class T>
const char* unsupported_weights(const char* weights, int widest) {
    const WeightFormat<T>* format = WeightFormats::find<T>(weights);
    if (!format) return "it has no kernels for such weights with activations of the model's type";
    if (widest > format->max_inputs) return "a layer has more inputs than kernels for such weights sum without overflow";
    return nullptr;
}

}  // namespace

extern "C" {

// The layout of every struct that the caller mirrors.
const char* llama_abi() {
    static const std::string description = describe_abi();
    return description.c_str();
}

// The reason why this process cannot compute such a model, or null. `widest`: inputs of the widest layer. `weights`: the
// name of the weight format.
const char* llama_unsupported_reason(int head_dim, int widest, int bfloat16, const char* weights) {
    if (!allow_tiles()) return "the kernel refuses the AMX registers that this CPU was compiled for";
    if (head_dim > kernels::kMaxHeadDim) return "head_dim is over 512";
    return bfloat16 ? unsupported_weights<bf16>(weights, widest) : unsupported_weights<float>(weights, widest);
}

// `tensors`: of the rank, with the names of the weight formats of the matrices, null of others. `modules`: the parts of weights that
// may have LoRA adapters. `operations`: of the model, see Transformer. All are read now.
// `rotary` float [max_seq_len][head_dim / 2][2] is read now; `cpus` [threads] or null. Returns null if the system has no memory
// or no threads left. The caller calls it only where llama_unsupported_reason returns null.
Engine* llama_create(const Shape* shape, const Tensor* tensors, const char* const* formats, int num_tensors,
                     const WeightPart* modules, int num_modules, const Operation* operations, int num_operations,
                     const Slots* slots, const float* rotary, const int32_t* cpus) try {
    const std::vector<Tensor> all(tensors, tensors + num_tensors);
    const std::vector<WeightPart> parts(modules, modules + num_modules);
    const std::vector<Operation> program(operations, operations + num_operations);
    std::vector<int> pins(cpus ? cpus : nullptr, cpus ? cpus + shape->threads : nullptr);
    Engine* engine = shape->bfloat16 ? create<bf16>(*shape, all, formats, parts, program, pins, rotary)
                                     : create<float>(*shape, all, formats, parts, program, pins, rotary);
    engine->slots = *slots;
    return engine;
} catch (const std::exception&) {
    return nullptr;
}

void llama_destroy(Engine* engine) { delete engine; }

void llama_pack(Engine* engine, const WeightPart* part, const void* source, int source_is_bfloat16) {
    engine->pack_weight(*part, {.dense = source, .is_bfloat16 = source_is_bfloat16 != 0});
}

// Keeps the groups of a matrix whose format has groups: codes [outputs][inputs], scales and minima (or null) float
// [outputs][groups]. See GroupedRow.
void llama_pack_groups(Engine* engine, const WeightPart* part, const uint8_t* codes, const float* scales, const float* minima) {
    engine->pack_weight(*part, {.groups = {codes, scales, minima}});
}

int llama_make_cache(Engine* engine, int blocks) try {
    engine->make_cache(blocks);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// Bytes of the largest all-gather from the rank that sends most.
size_t llama_gather_bytes(const Shape* s) {
    const size_t sums = size_t(s->max_tokens) * round_up(s->dim, kTileOutputs) * 4,
                 logits = size_t(s->max_samples) * largest_part(s->full_vocab, s->ranks) * 4;
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
int llama_step(Engine* engine, const Row* rows, int num_rows, int64_t* sampled, int logits_everywhere, const TokenMask* masks) {
    engine->step(rows, num_rows, sampled, logits_everywhere, masks);
    return engine->all_gather && engine->all_gather->failed();
}

void llama_logits_of(Engine* engine, const int32_t* tokens, int count) { engine->logits_of(tokens, count); }
// `states`: float [count][dim].
void llama_hidden_states_of(Engine* engine, int first, int count, float* states) {
    engine->hidden_states_of(first, count, states);
}

// Empties a place, and gives it the pair of one weight; see Adapters.
void llama_clear_adapter(Engine* engine, int place) { engine->clear_adapter(place); }
void llama_pack_adapter(Engine* engine, int place, const WeightPart* part, int rank, float scale, const float* a,
                        const float* b) {
    engine->pack_adapter(place, *part, rank, scale, a, b);
}

// Overwrites a token's embedding, float [columns of this rank]: for tests of values that are not finite.
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
double llama_seconds_sampled(Engine* engine) { return engine->seconds_sampled; }
double llama_waited_for_masks(Engine* engine) { return engine->waited_for_masks; }
double llama_waited(Engine* engine) {
    return engine->waited_for_masks + (engine->all_gather ? engine->all_gather->waited() : 0.0);
}
size_t llama_weight_bytes(Engine* engine) { return engine->weight_bytes; }
size_t llama_working_bytes(Engine* engine) { return engine->working_bytes; }

}  // extern "C"
