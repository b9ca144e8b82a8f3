// Linear layers y = x W^T on packed weights, for any number of rows: the part that all weight formats share.
//
// W [n, k] is cut into output tiles of 32 outputs. Within a tile, weights lie in the order in which they are used, so a call for
// a row reads a tile as one stream, or several tiles as so many. Every result is summed over k in one fixed order, so a row's
// values do not depend on the number of rows. The compiler's target decides the instructions: AMX, AVX-512 or plain vectors.
//
// A weight format is a struct with static members in a header of weight_formats/. Those of a format F:
//   Activation          the type T of the activations that F multiplies
//   kName               the name that Python asks for
//   kLayout             a WeightLayout
//   kSliceInputs        inputs of a K slice: whole steps of the layout
//   kInputForm          what F multiplies: Inputs::rows or Inputs::quantized
//   kMaxInputs          the most inputs of a layer whose sums are exact
//   kGroup              inputs that share a scale in pack_groups
//   pack                packs one row of W, S source[inputs] (float or bf16), as output `output`
//   pack_groups         packs one row of W that is stored in groups as F has them, as output `output`; null in other formats
//   multiply            y of output tile `tile` for rows <= kMaxRows of x, from row `row`, into `out` [kMaxRows][kTileOutputs].
//                       `first`: no earlier rows used the tile, so its weights come from memory and are prefetched.
//   multiply_streams    y of kStreams output tiles for rows <= kStreamRows of x, into `out` [kStreams][rows][kTileOutputs]. The
//                       tiles are `distance` apart, the first is `tile`.
//   expand              with LLAMA_AMX: writes inputs from .. to of an output tile in the form that tile registers multiply, at
//                       most kMaxExpandedBytes a K slice; null if it is the packed form
//   add_k_slice         with LLAMA_AMX: adds the products of inputs from .. to (whole steps of the layout) to `sums` of up to
//                       kMaxRows rows. from = 0 begins new sums. `slice`: the weights of these inputs, expanded if F expands.
//   finish              with LLAMA_AMX: the results of `sums`, in `out` or in `sums` itself
// kFormatOf<F> turns the struct into a WeightFormat, whose functions the engine calls: a call computes 32 rows by 32 outputs.
#pragma once

#include <climits>
#include <type_traits>

#include "../base/amx_tiles.hpp"
#include "../base/memory.hpp"
#include "../base/simd.hpp"
#include "quantized.hpp"

namespace llama {

constexpr int kRegisterTiles = 2;                  // of an output tile
constexpr int kTileOutputs = kRegisterTiles * 16;  // of an output tile
constexpr size_t kRegisterTileBytes = 1024;        // of one tile register
constexpr size_t kMaxExpandedBytes = 18432;        // of a K slice that a format expands

// Few rows wait for memory, and a core reads it faster in several runs side by side than in one: more pages of the DRAM are open,
// and more of the core's prefetchers work.
constexpr int kStreams = 4;
#if defined(__AVX512F__)
constexpr int kStreamRows = 3;  // more rows need too many registers
#else
constexpr int kStreamRows = 1;
#endif

// How a format stores an output tile: one step after another, each with the weights of `step_inputs` inputs.
struct WeightLayout {
    size_t step_inputs;       // inputs are padded to a multiple of this
    size_t step_bytes;        // of the 32 outputs' weights in a step, with the scales and minima of their groups
    size_t block_inputs = 0;  // of a block of steps that begins with head_bytes; 0 without blocks
    size_t head_bytes = 0;
};

// The memory of one layer's weights.
class PackedWeights {
  public:
    PackedWeights() = default;
    PackedWeights(const WeightLayout& layout, int outputs, int inputs)
        : inputs_(inputs), output_tiles_(int(round_up(outputs, kTileOutputs) / kTileOutputs)) {
        layout_ = layout;
        padded_ = round_up(inputs, layout.step_inputs);
        output_tile_bytes_ = offset(padded_);
        memory_ = Memory(output_tile_bytes_ * output_tiles_);
    }

    int inputs() const { return inputs_; }
    size_t padded() const { return padded_; }  // inputs with padding
    int output_tiles() const { return output_tiles_; }
    int num_outputs() const { return output_tiles_ * kTileOutputs; }  // with padding
    size_t bytes() const { return memory_.bytes(); }
    char* output_tile(int tile) const { return memory_.as<char>() + tile * output_tile_bytes_; }
    // Of `input`, which begins a block or a step of a format without blocks, in an output tile.
    size_t offset(size_t input) const {
        const size_t blocks = layout_.block_inputs ? (input + layout_.block_inputs - 1) / layout_.block_inputs : 0;
        return input / layout_.step_inputs * layout_.step_bytes + blocks * layout_.head_bytes;
    }

  private:
    int inputs_ = 0, output_tiles_ = 0;
    WeightLayout layout_{};
    size_t padded_ = 0, output_tile_bytes_ = 0;
    Memory memory_;
};

// The inputs of linear layers: activations, and the same activations as integers for the formats that multiply integers.
template <class T>
struct Inputs {
    Activations<T> rows;
    Quantized quantized;
    Inputs() = default;
    Inputs(size_t num_rows, size_t width) : rows(num_rows, width) {}
    T* operator[](size_t row) const { return rows[row]; }
    size_t bytes() const { return rows.bytes() + quantized.bytes(); }

    // Reserves memory for a form that a layer multiplies.
    void reserve(InputForm form, size_t num_rows, size_t width, bool in_parts = false) {
        if (form == InputForm::kRows && !quantized.bytes()) quantized = Quantized(num_rows, width, in_parts);
    }
    // `width`: a multiple of 16. `num_rows`: of the product.
    void quantize(InputForm form, size_t row, int width, size_t num_rows) {
        if (form == InputForm::kRows) quantized.quantize(rows[row], row, width, num_rows);
    }
};

// One row of weights in groups of `group_inputs` of the format, see `Coding` of model/weight_formats.py.
struct GroupedRow {
    const uint8_t* codes;  // [inputs]; those of 8 bits are int8
    const float* scales;   // [groups]
    const float* minima;   // [groups], or null
};

// A weight format for activations T. `add_k_slice`, `finish` and `expand` are null without tile registers.
template <class T>
struct WeightFormat {
    const char* name;
    WeightLayout layout;
    size_t slice_inputs;
    InputForm input_form;
    int max_inputs, group_inputs;
    void (*pack_float32)(const PackedWeights& w, const float* source, int output);
    void (*pack_bfloat16)(const PackedWeights& w, const bf16* source, int output);
    void (*pack_groups)(const PackedWeights& w, const GroupedRow& source, int output);
    void (*multiply)(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, bool first, float* out);
    void (*multiply_streams)(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, int distance,
                             float* out);
    void (*add_k_slice)(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, size_t from, size_t to,
                        const char* slice, void* sums) = nullptr;
    const float* (*finish)(const PackedWeights& w, const Inputs<T>& x, size_t row, int rows, int tile, const void* sums,
                           float* out) = nullptr;
    void (*expand)(const PackedWeights& w, int tile, size_t from, size_t to, char* out) = nullptr;
};

template <class F>
constexpr WeightFormat<typename F::Activation> kFormatOf{
    F::kName,
    F::kLayout,
    F::kSliceInputs,
    F::kInputForm,
    F::kMaxInputs,
    F::kGroup,
    F::template pack<float>,
    F::template pack<bf16>,
    F::pack_groups,
    F::multiply,
    F::multiply_streams,
#if defined(LLAMA_AMX)
    F::add_k_slice,
    F::finish,
    F::expand,
#endif
};

// One linear layer.
template <class T>
class Linear : public PackedWeights {
  public:
    Linear() = default;
    Linear(const WeightFormat<T>& format, int outputs, int inputs)
        : PackedWeights(format.layout, outputs, inputs), format_(&format) {}

    const WeightFormat<T>& format() const { return *format_; }
    void pack(const float* source, int output) const { format_->pack_float32(*this, source, output); }
    void pack(const bf16* source, int output) const { format_->pack_bfloat16(*this, source, output); }
    void pack(const GroupedRow& source, int output) const { format_->pack_groups(*this, source, output); }

  private:
    const WeightFormat<T>* format_ = nullptr;
};

namespace kernels {

// Bytes between the use of a weight and the prefetch of another: hardware prefetchers stop at every 4 KiB page. Prefetches go
// into the second-level cache, because the first level has too few requests in flight to keep memory busy.
constexpr size_t kAhead = 2048;
inline void prefetch(const char* p) { __builtin_prefetch(p + kAhead, 0, 2); }
// Prefetches a quarter of an output tile's step. Kernels call it between loads: a whole step at once would fill the line
// buffers that the loads need.
template <bool Ask>
inline void prefetch_quarter(const char* p, int quarter) {
    constexpr size_t bytes = kRegisterTiles * kRegisterTileBytes / 4;
    if (Ask)
        for (size_t line = 0; line < bytes; line += 64) prefetch(p + quarter * bytes + line);
}

// Calls kernel(N, whether to prefetch weights, first of these rows) for N rows at a time, N <= Most, until all are done.
template <int Most, class Kernel>
void by_rows(int rows, bool first, Kernel&& kernel) {
    int r = 0;
    for (; r + Most <= rows; r += Most)
        if (first && r == 0)
            kernel(std::integral_constant<int, Most>(), std::true_type(), r);
        else
            kernel(std::integral_constant<int, Most>(), std::false_type(), r);
    if constexpr (Most > 1)
        if (r < rows) by_rows<Most - 1>(rows - r, first && r == 0, [&](auto n, auto ask, int at) { kernel(n, ask, r + at); });
}

// The packed weights of S output tiles, `distance` apart.
template <int S>
struct Streams {
    const char* of[S];
    Streams(const PackedWeights& w, int tile, int distance) {
        for (int s = 0; s < S; s++) of[s] = w.output_tile(tile + s * distance);
    }
    const char* operator[](int s) const { return of[s]; }
};

// Writes the sums of N rows under S output tiles: out [S][N][kTileOutputs].
template <int N, int S>
inline void store_sums(const Vec (&sums)[S][N][kRegisterTiles], float* out) {
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < N; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++)
        store(out + (s * N + r) * kTileOutputs + t * kLanes, sums[s][r][t]);
}

// Rows whose sums fill most of the registers: 24 of AVX-512's 32, 12 of AVX2's 16 (two of which hold a Vec).
#if defined(__AVX512F__)
constexpr int kFloatRows = 12;
#else
constexpr int kFloatRows = 3;
#endif

// Calls kernel(N, S, first of these streams) for N = `rows` and S streams at a time, N S <= Most where S > 1, until all are done.
template <int Most, int N = 1, class Kernel>
void by_streams(int rows, Kernel&& kernel) {
    if constexpr (N < kStreamRows)
        if (rows > N) return by_streams<Most, N + 1>(rows, kernel);
    constexpr int S = Most / N >= 4 ? 4 : Most / N >= 2 ? 2 : 1;
    static_assert(kStreams % S == 0);
    for (int stream = 0; stream < kStreams; stream += S)
        kernel(std::integral_constant<int, N>(), std::integral_constant<int, S>(), stream);
}

#if defined(LLAMA_AMX)
constexpr int kOutBytes = kTileOutputs * 4;  // a row of `out`

// Reads a line into the first-level cache, and prefetches another: a tile load waits for its lines one after the other.
inline void fetch(const char* line) {
    prefetch(line);
    asm volatile("" ::"r"(load_as<uint64_t>(line)));
}
#endif

}  // namespace kernels
}  // namespace llama
