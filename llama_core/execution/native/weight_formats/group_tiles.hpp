// Grouped weights by activations in groups of 8-bit integers, on the tile registers of AMX: a tile product for each group.
//
// Codes and scaled activations are bfloat16 numbers whose products and sums over a group float32 holds exactly, so a tile product
// needs no conversion, and has the bits of the integer products.
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

// An expanded step: codes as bfloat16 [2 halves][16 pairs of k][16 outputs][2], then float scales [32], then float minima [32] if
// the format has them.
template <class C>
struct ExpandedStep {
    static constexpr size_t kScales = kRegisterTiles * kRegisterTileBytes, kMinima = kScales + kTileOutputs * 4;
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
        UNROLL for (int pair = 0; pair < 16; pair++) {
                    const UVec codes = C::Codes::template pair<C::kOffset>(Step::codes(step, t), pair);
                    std::memcpy(out + t * kRegisterTileBytes + pair * 64, &codes, sizeof codes);
                }
                store(scales_of(out) + t * kLanes, Step::scales(step, t));
                if constexpr (C::kMinima) store(minima_of(out) + t * kLanes, Step::minima(step, t));
            }
    }

    static void add_k_slice(const PackedWeights&, const Inputs<bf16>& x, size_t row, int rows, int tile, size_t from, size_t to,
                            const char* slice, void* sums) {
        add_slice(GroupRows(x.groups, row), rows, from / kGroupInputs, to / kGroupInputs, slice, static_cast<float*>(sums));
        (void)tile;
    }

    static const float* finish(const PackedWeights&, const Inputs<bf16>&, size_t, int, int, const void* sums, float*) {
        return static_cast<const float*>(sums);
    }

    // `first`: no earlier rows used the output tile, so its weights come from memory.
    static void multiply_tiles(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                               float* out) {
        constexpr size_t kSlice = kBlockGroups * kGroupInputs;
        alignas(64) char expanded[kBlockGroups * Expanded::kBytes];
        for (size_t from = 0; from < w.padded(); from += kSlice) {
            const size_t to = std::min(w.padded(), from + kSlice);
            if (first) {
                const char* step = w.output_tile(tile) + from / kGroupInputs * Step::kBytes;
                for (size_t line = 0; line < kBlockGroups * Step::kLines; line++) kernels::prefetch(step + line * 64);
            }
            expand(w, tile, from, to, expanded);
            add_slice(GroupRows(x.groups, row), rows, from / kGroupInputs, to / kGroupInputs, expanded, out);
        }
    }

  private:
    // Products of so many groups are stored before they are added: a load that follows its store at once would wait for it.
    static constexpr size_t kBlockGroups = 4;
    using Products = float[2][kRegisterTiles][16][16];  // of 32 rows by an output tile, for one group

    static float* scales_of(char* step) { return reinterpret_cast<float*>(step + Expanded::kScales); }
    static float* minima_of(char* step) { return reinterpret_cast<float*>(step + Expanded::kMinima); }

    // Adds groups begin .. end to sums [kMaxRows][kTileOutputs]; begin = 0 begins new sums. Computes whole register tiles: rows
    // beyond `rows` are products of the memory behind x, and nothing reads them.
    static void add_slice(const GroupRows& x, int rows, size_t begin, size_t end, const char* slice, float* sums) {
        alignas(64) Products products[kBlockGroups];
        for (size_t g = begin; g < end; g += kBlockGroups) {
            const size_t count = std::min(kBlockGroups, end - g);
            asm volatile("" ::"r"(slice) : "memory");  // GCC's tile loads declare no reads: the slice must be in memory
            for (size_t i = 0; i < count; i++) {
                const bf16* inputs = x.rounded.data + (g + i) * kGroupInputs;
                (rows > 16 ? multiply_32 : multiply_16)(inputs, x.rounded.stride, slice + i * Expanded::kBytes, products[i]);
            }
            for (int row = 0; row < rows; row += 16)
                for (int t = 0; t < kRegisterTiles; t++) add(x, row, t, g, count, slice, products, sums);
            slice += count * Expanded::kBytes;
        }
    }

    // GCC's intrinsics paste a register into the instruction's name, so it must be a literal.
    static void multiply_16(const bf16* x, size_t stride, const char* codes, Products& out) {
        _tile_zero(0); _tile_zero(1);
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(6, codes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, codes + kRegisterTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stored(0, out[0][0], 64); _tile_stored(1, out[0][1], 64);
    }

    static void multiply_32(const bf16* x, size_t stride, const char* codes, Products& out) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(6, codes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + 16 * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, codes + kRegisterTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        _tile_stored(0, out[0][0], 64); _tile_stored(2, out[1][0], 64);
        _tile_stored(1, out[0][1], 64); _tile_stored(3, out[1][1], 64);
    }

    // The same operations in the same order as add_group, for 16 rows by 16 outputs.
    static void add(const GroupRows& x, int row, int t, size_t g, size_t count, const char* slice, const Products* products,
                    float* sums) {
        float* to = sums + row * kTileOutputs + t * kLanes;
        Vec acc[16];
        UNROLL for (int i = 0; i < 16; i++) acc[i] = g ? load(to + i * kTileOutputs) : Vec{};
        for (size_t group = 0; group < count; group++, slice += Expanded::kBytes) {
            const Vec scales = load(reinterpret_cast<const float*>(slice + Expanded::kScales) + t * kLanes);
            const auto& product = products[group][row / 16][t];
            UNROLL for (int i = 0; i < 16; i++) acc[i] = fma(load(product[i]), scales, acc[i]);
            if constexpr (C::kMinima) {
                const Vec minima = load(reinterpret_cast<const float*>(slice + Expanded::kMinima) + t * kLanes);
                UNROLL for (int i = 0; i < 16; i++) acc[i] = fma(minima, splat(x.scaled_sum(row + i, g + group)), acc[i]);
            }
        }
        UNROLL for (int i = 0; i < 16; i++) store(to + i * kTileOutputs, acc[i]);
    }
};
#endif

}  // namespace llama
