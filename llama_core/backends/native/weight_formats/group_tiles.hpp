// Grouped weights by activations in groups of 8-bit integers, on the tile registers of AMX: a tile product for each group.
//
// The codes of weights and of activations are bfloat16 numbers whose products and sums over a group float32 holds exactly, so a
// tile product is the sum of integers as a float.
#pragma once

#include "group_vectors.hpp"

namespace llama {

// What a format needs beside `multiply` where there are tile registers: nothing for float32 activations.
template <class T, class C>
struct GroupedTileKernels {
    static constexpr std::nullptr_t add_k_slice = nullptr, finish = nullptr, expand = nullptr;
};

#if defined(LLAMA_AMX)
namespace kernels {

// An expanded step: codes as bfloat16 [2 halves][16 pairs of k][16 outputs][2], then float scales [32].
template <class C>
struct ExpandedStep {
    static constexpr size_t kScales = kRegisterTiles * kRegisterTileBytes, kBytes = kScales + kTileOutputs * 4;
};

}  // namespace kernels

template <class C>
struct GroupedTileKernels<bf16, C> {
    using Step = GroupStep<C>;
    using Expanded = kernels::ExpandedStep<C>;
    static_assert(kGroupedSliceInputs / kGroupInputs * Expanded::kBytes <= kMaxExpandedBytes);

    static void expand(const PackedWeights& w, int tile, size_t from, size_t to, char* out) {
        const char* step = w.output_tile(tile) + from / kGroupInputs * Step::kBytes;
        for (size_t k = from; k < to; k += kGroupInputs, step += Step::kBytes, out += Expanded::kBytes)
            for (int t = 0; t < kRegisterTiles; t++) {
        UNROLL for (int pair = 0; pair < 16; pair++) {
                    const UVec codes = C::Codes::pair(Step::codes(step, t), pair);
                    std::memcpy(out + t * kRegisterTileBytes + pair * 64, &codes, sizeof codes);
                }
                store(scales_of(out) + t * kLanes, Step::scales(step, t));
            }
    }

    static void add_k_slice(const PackedWeights&, const Inputs<bf16>& x, size_t row, int rows, int, size_t from, size_t to,
                            const char* slice, void* sums) {
        add_slice(GroupRows(x.groups, row), rows, from / kGroupInputs, to / kGroupInputs, slice, nullptr,
                  static_cast<float*>(sums));
    }

    static const float* finish(const PackedWeights&, const Inputs<bf16>&, size_t, int, int, const void* sums, float*) {
        return static_cast<const float*>(sums);
    }

    // `first`: no earlier rows used the output tile, so its weights come from memory.
    static void multiply_tiles(const PackedWeights& w, const Inputs<bf16>& x, size_t row, int rows, int tile, bool first,
                               float* sums) {
        constexpr size_t kSlice = kBlockGroups * kGroupInputs;
        alignas(64) char expanded[kBlockGroups * Expanded::kBytes];
        const GroupRows inputs(x.groups, row);
        for (size_t from = 0; from < w.padded(); from += kSlice) {
            const size_t to = std::min(w.padded(), from + kSlice);
            const char* packed = w.output_tile(tile) + from / kGroupInputs * Step::kBytes;
            expand(w, tile, from, to, expanded);
            add_slice(inputs, rows, from / kGroupInputs, to / kGroupInputs, expanded, first ? packed : nullptr, sums);
        }
    }

  private:
    // Products of so many groups are stored before they are added: a load that follows its store at once would wait for it.
    static constexpr int kBlockGroups = 4;
    static constexpr size_t kRegisterTileFloats = 16 * 16;

    static float* scales_of(char* step) { return reinterpret_cast<float*>(step + Expanded::kScales); }

    // Adds groups begin .. end to sums [kMaxRows][kTileOutputs]; begin = 0 begins new sums. Computes whole register tiles: rows
    // beyond `rows` are products of the memory after x, and nothing reads them. The first row of x is a multiple of 16.
    // `packed`: where prefetches begin, or null. They are spread over the products: requests come as fast as memory serves them.
    static void add_slice(const GroupRows& x, int rows, size_t begin, size_t end, const char* slice, const char* packed,
                          float* sums) {
        const auto add = packed ? rows > 16 ? add_rows<2, true> : add_rows<1, true>
                                : rows > 16 ? add_rows<2, false> : add_rows<1, false>;
        add(x, begin, end, slice, packed, sums);
    }

    template <int kHalves, bool kAsk>
    static void add_rows(const GroupRows& x, size_t begin, size_t end, const char* slice, const char* packed, float* sums) {
        asm volatile("" ::"r"(slice) : "memory");  // GCC's tile loads declare no reads: the slice must be in memory
        size_t g = begin;
        for (; g + kBlockGroups <= end; g += kBlockGroups) {
            add_block<kHalves, kBlockGroups, kAsk>(x, g, slice, packed, sums);
            slice += kBlockGroups * Expanded::kBytes;
            if (kAsk) packed += kBlockGroups * Step::kBytes;
        }
        for (; g < end; g++) {
            add_block<kHalves, 1, kAsk>(x, g, slice, packed, sums);
            slice += Expanded::kBytes;
            if (kAsk) packed += Step::kBytes;
        }
    }

    // Adds kGroups groups of 16 kHalves rows.
    template <int kHalves, int kGroups, bool kAsk>
    static void add_block(const GroupRows& x, size_t g, const char* slice, const char* packed, float* sums) {
        constexpr int kParts = kGroups + kHalves * kRegisterTiles;
        alignas(64) float products[kGroups][kHalves * kRegisterTiles * kRegisterTileFloats];
        const bf16* inputs = x.numbers + g * 16 * kGroupInputs;
        for (int i = 0; i < kGroups; i++, inputs += 16 * kGroupInputs) {
            multiply_group<kHalves>(inputs, inputs + x.num_groups * 16 * kGroupInputs, slice + i * Expanded::kBytes, products[i]);
            if (kAsk) prefetch_part<kGroups, kParts>(packed, i);
        }
        for (int half = 0; half < kHalves; half++)
            for (int t = 0; t < kRegisterTiles; t++) {
                if (kAsk) prefetch_part<kGroups, kParts>(packed, kGroups + half * kRegisterTiles + t);
                const float* tile = products[0] + (half * kRegisterTiles + t) * kRegisterTileFloats;
                add<kGroups, kHalves>(x, half * 16, g, tile, slice + t * kLanes * sizeof(float),
                                      sums + half * 16 * kTileOutputs + t * kLanes);
            }
    }

    // Prefetches one of kParts parts of kGroups steps, two blocks beyond `packed`: a block's steps are expanded all at once.
    template <int kGroups, int kParts>
    static void prefetch_part(const char* packed, int part) {
        constexpr size_t kLines = kGroups * Step::kLines, kBeyond = 2 * kBlockGroups * Step::kBytes;
        for (size_t line = part * kLines / kParts; line < (part + 1) * kLines / kParts; line++)
            __builtin_prefetch(packed + kBeyond + line * 64, 0, 2);
    }

    // One group of 16 or 32 rows by the output tile: a register tile after the other, into `out`. A product is stored while the
    // next one runs.
    template <int kHalves>
    static void multiply_group(const bf16* x, const bf16* lower, const char* codes, float* out) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, codes, 64);
        _tile_zero(0);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, codes + kRegisterTileBytes, 64);
        _tile_zero(1);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stored(0, out, 64);
        if constexpr (kHalves == 2) {
            _tile_loadd(5, lower, 64);
            _tile_zero(2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_stored(1, out + kRegisterTileFloats, 64);
            _tile_zero(3);
            _tile_dpbf16ps(3, 5, 7);
            _tile_stored(2, out + 2 * kRegisterTileFloats, 64);
            _tile_stored(3, out + 3 * kRegisterTileFloats, 64);
        } else {
            _tile_stored(1, out + kRegisterTileFloats, 64);
        }
    }

    // Adds the products of 16 rows by 16 outputs to `sums`, with the same operations in the same order as add_group. `step`: the
    // first group's, moved to the 16 outputs.
    template <int kGroups, int kHalves>
    static void add(const GroupRows& x, int row, size_t g, const float* products, const char* step, float* sums) {
        const float* row_scales = x.tile_scales + (row * x.num_groups + g * 16);
        Vec acc[16];
        UNROLL for (int i = 0; i < 16; i++) acc[i] = g ? load(sums + i * kTileOutputs) : Vec{};
        UNROLL for (int group = 0; group < kGroups; group++) {
            const Vec scales = load(reinterpret_cast<const float*>(step + group * Expanded::kBytes + Expanded::kScales));
            const float* product = products + group * kHalves * kRegisterTiles * kRegisterTileFloats;
            UNROLL for (int i = 0; i < 16; i++) acc[i] =
                fma(load(product + i * 16) * splat(row_scales[group * 16 + i]), scales, acc[i]);
        }
        UNROLL for (int i = 0; i < 16; i++) store(sums + i * kTileOutputs, acc[i]);
    }
};
#endif

}  // namespace llama
