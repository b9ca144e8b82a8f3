// Grouped weights by activations in groups of 8-bit integers, on the tile registers of AMX: a tile product for each group.
#pragma once

#include "group_vectors.hpp"

namespace llama {

// What a format needs beside `multiply` where there are tile registers: nothing for float32 activations.
template <class T, class C>
struct GroupedTileKernels {
    static constexpr size_t kExpandedStepBytes = 0;
    static constexpr std::nullptr_t add_k_slice = nullptr, finish = nullptr, expand = nullptr;
};

#if defined(LLAMA_AMX)
namespace kernels {

// Sets the shapes of the tile registers for products of one group, and restores them at its end.
struct GroupTiles {
    GroupTiles() {
        TileShapes shapes;
        for (int tile : {4, 5}) shapes.row_bytes[tile] = kGroupInputs;  // activations
        for (int tile : {6, 7}) shapes.rows[tile] = kFours;             // codes
        shapes.use();
    }
    ~GroupTiles() { use_tiles(); }
};

typedef uint8_t CodeVec __attribute__((vector_size(64)));

// An expanded step: signed codes [2 halves][fours of k][16 outputs][4], then float scales [32], then float minima [32] if the
// format has them.
template <class C>
struct ExpandedStep {
    static constexpr size_t kHalfBytes = 16 * kGroupInputs, kScales = 2 * kHalfBytes, kMinima = kScales + kTileOutputs * 4;
    static constexpr size_t kBytes = kMinima + C::kMinima * kTileOutputs * 4;
};

}  // namespace kernels

template <class C>
struct GroupedTileKernels<bf16, C> {
    using Step = GroupStep<C>;
    using Expanded = kernels::ExpandedStep<C>;
    static constexpr size_t kExpandedStepBytes = Expanded::kBytes;

    static void expand(const PackedWeights& w, int tile, size_t from, size_t to, char* out) {
        const char* step = w.output_tile(tile) + from / kGroupInputs * Step::kBytes;
        for (size_t k = from; k < to; k += kGroupInputs, step += Step::kBytes, out += Expanded::kBytes)
            for (int t = 0; t < kRegisterTiles; t++) {
                for (int four = 0; four < kFours; four++) {
                    const auto codes = (kernels::CodeVec)C::Codes::four(Step::codes(step, t), four) - uint8_t(C::kBias);
                    std::memcpy(out + t * Expanded::kHalfBytes + four * 64, &codes, sizeof codes);
                }
                store(reinterpret_cast<float*>(out + Expanded::kScales) + t * kLanes, Step::scales(step, t));
                if constexpr (C::kMinima)
                    store(reinterpret_cast<float*>(out + Expanded::kMinima) + t * kLanes, Step::minima(step, t));
            }
    }

    static void add_k_slice(const PackedWeights&, const Inputs<bf16>& x, size_t row, int rows, int tile, size_t from, size_t to,
                            const char* slice, void* sums) {
        const kernels::GroupTiles tiles;
        add_slice(GroupRows(x.groups, row), rows, from / kGroupInputs, to / kGroupInputs, slice, static_cast<float*>(sums));
        (void)tile;
    }

    static const float* finish(const PackedWeights&, const Inputs<bf16>&, size_t, int, int, const void* sums, float*) {
        return static_cast<const float*>(sums);
    }

    // `first`: no earlier rows used the output tile, so its weights come from memory.
    static void multiply_tiles(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                               float* out) {
        constexpr size_t kSlice = 8 * kGroupInputs;
        alignas(64) char expanded[kSlice / kGroupInputs * Expanded::kBytes];
        const kernels::GroupTiles tiles;
        for (size_t from = 0; from < w.padded(); from += kSlice) {
            const size_t to = std::min(w.padded(), from + kSlice);
            if (first) {
                const char* step = w.output_tile(tile) + from / kGroupInputs * Step::kBytes;
                for (size_t line = 0; line < kSlice / kGroupInputs * Step::kLines; line++) kernels::prefetch(step + line * 64);
            }
            expand(w, tile, from, to, expanded);
            add_slice(GroupRows(x.groups, row), rows, from / kGroupInputs, to / kGroupInputs, expanded, out);
        }
    }

  private:
    using Dots = int32_t[16][16];

    // Adds groups begin .. end to sums [kMaxRows][kTileOutputs]; begin = 0 begins new sums. Computes whole register tiles: rows
    // beyond `rows` are products of the memory behind x, and nothing reads them.
    static void add_slice(const GroupRows& x, int rows, size_t begin, size_t end, const char* slice, float* sums) {
        asm volatile("" ::"r"(slice) : "memory");  // GCC's tile loads declare no reads: the slice must be in memory
        for (int t = 0; t < kRegisterTiles; t++)
            for (int row = 0; row < rows; row += 16)
                add_register_tile(x, row, t, begin, end, slice, sums + row * kTileOutputs + t * kLanes);
    }

    static void add_register_tile(const GroupRows& x, int row, int t, size_t begin, size_t end, const char* slice,
                                  float* sums) {
        // The product of the next group runs while the sums of this group are converted: each has its own registers.
        alignas(64) Dots dots[2];
        Vec acc[16];
        UNROLL for (int i = 0; i < 16; i++) acc[i] = begin ? load(sums + i * kTileOutputs) : Vec{};
        start<0>(x, row, t, begin, slice, dots[0]);
        for (size_t g = begin; g < end; g++, slice += Expanded::kBytes) {
            const bool odd = (g - begin) % 2;
            if (g + 1 < end) {
                if (odd)
                    start<0>(x, row, t, g + 1, slice + Expanded::kBytes, dots[0]);
                else
                    start<1>(x, row, t, g + 1, slice + Expanded::kBytes, dots[1]);
            }
            add(x, row, t, g, slice, dots[odd], acc);
        }
        UNROLL for (int i = 0; i < 16; i++) store(sums + i * kTileOutputs, acc[i]);
    }

    // GCC's intrinsics paste the register into the instruction's name, so it must be a literal.
    template <int Sums>
    static void start(const GroupRows& x, int row, int t, size_t g, const char* step, Dots& dots) {
        const char* codes = step + t * Expanded::kHalfBytes;
        if constexpr (Sums == 0) {
            _tile_zero(0);
            _tile_loadd(4, x.group(row, g), x.stride);
            _tile_loadd(6, codes, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_stored(0, dots, 64);
        } else {
            _tile_zero(1);
            _tile_loadd(5, x.group(row, g), x.stride);
            _tile_loadd(7, codes, 64);
            _tile_dpbssd(1, 5, 7);
            _tile_stored(1, dots, 64);
        }
    }

    // The same operations in the same order as add_group.
    static void add(const GroupRows& x, int row, int t, size_t g, const char* step, const Dots& dots, Vec (&acc)[16]) {
        const Vec scales = load(reinterpret_cast<const float*>(step + Expanded::kScales) + t * kLanes);
        UNROLL for (int i = 0; i < 16; i++) {
            const Vec dot = __builtin_convertvector(load_as<IVec>(dots[i]), Vec);
            acc[i] = fma(dot, scales * splat(x.scale(row + i, g)), acc[i]);
            if constexpr (C::kMinima) {
                const Vec minima = load(reinterpret_cast<const float*>(step + Expanded::kMinima) + t * kLanes);
                acc[i] = fma(minima, splat(x.scaled_sum(row + i, g)), acc[i]);
            }
        }
    }
};
#endif

}  // namespace llama
