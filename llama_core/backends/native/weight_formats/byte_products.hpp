// Products of 8-bit weights with one scale for each output by activations of 16 bits (Quantized): what int8, int4 and int4_min share.
//
// Sums of products are exact integers, which no order of summation changes, so all kernels and builds give the same bits. A sum
// needs up to 40 bits: kernels hold it as 256 * upper + lower in two 32-bit integers.
//
// A format keeps for each output a float scale and the int32 sum of its weights, as PackedWeights::per_output.
#pragma once

#include "../layers/linear.hpp"

namespace llama {

struct ByteProducts {
    static constexpr size_t kBytesPerOutput = 8;
    static constexpr size_t kSumBytes = 8;       // of the high and of the low bytes
    static constexpr size_t kSliceInputs = 512;  // 16 KiB of an output tile's weights
    static constexpr int kMaxInputs = 66'000;    // products of so many bytes fit into 32 bits

    static float* scales(const PackedWeights& w) { return w.per_output().template as<float>(); }
    static int32_t* weight_sums(const PackedWeights& w) {
        return w.per_output().template as<int32_t>() + size_t(w.num_outputs());
    }

    // The results of 16 outputs, of which `output` is the first: the sums 256 * upper + lower by both scales.
    static Vec dequantize(IVec upper, IVec lower, const PackedWeights& w, int output, float x_scale) {
        upper += lower >> 8;  // lower becomes 0 .. 255, so equal sums have equal halves and are rounded in the same way
        const Vec exact = fma(to_float(upper), splat(256.0f), to_float(lower & 255));
        return exact * load(scales(w) + output) * splat(x_scale);
    }

    // Of sums over high and low bytes. High bytes are 128 too large.
    static Vec dequantize_bytes(IVec high, IVec low, const PackedWeights& w, int output, float x_scale) {
        return dequantize(high - load_as<IVec>(weight_sums(w) + output) * 128, low, w, output, x_scale);
    }

#if defined(LLAMA_AMX)
    // Of kMaxRows rows by an output tile.
    struct Sums {
        int32_t of[2][kMaxRows / 16][kRegisterTiles][16][16];  // [high, low][half of the rows][register tile][row][output]
    };
    // Memory to prefetch while a K slice is multiplied: the requests are spread over its products.
    struct Ahead {
        const char* from = nullptr;
        size_t lines = 0;  // of each step of each pass
    };

    // Adds the products of inputs from .. to by `weights` [(to - from) / 64][register tile][16 fours][16 outputs][4]. `from` is a
    // multiple of 64; from = 0 begins new sums. Rows beyond `rows` are products of the memory after x, and nothing reads them.
    static void add_products(const Quantized& x, size_t row, int rows, size_t from, size_t to, const char* weights, Ahead ahead,
                             Sums& sums) {
        asm volatile("" ::"r"(weights), "r"(&sums) : "memory");  // GCC's tile loads declare no reads
        const size_t steps = (to - from + Quantized::kStep - 1) / Quantized::kStep;
        const uint8_t* high = x.high(row, from / Quantized::kStep);
        const auto multiply = ahead.from ? multiply_tiles<true> : multiply_tiles<false>;
        if (rows > 16)
            for (int byte = 0; byte < 2; byte++) {
                const uint8_t* inputs = high + byte * Quantized::kTileBytes;
                multiply(inputs, inputs + x.steps * Quantized::kStepBytes, weights, steps, ahead, sums.of[byte][0][0],
                         sums.of[byte][1][0], from == 0);
                ahead.from += steps * ahead.lines * 64;
            }
        else
            multiply(high, high + Quantized::kTileBytes, weights, steps, {ahead.from, 2 * ahead.lines}, sums.of[0][0][0],
                     sums.of[1][0][0], from == 0);
    }

    static const float* finish(const PackedWeights& w, const Quantized& x, size_t row, int rows, int tile, const Sums& sums,
                               float* out) {
        for (int r = 0; r < rows; r++) UNROLL for (int t = 0; t < kRegisterTiles; t++) {
                const IVec high = load_as<IVec>(sums.of[0][r / 16][t][r % 16]), low = load_as<IVec>(sums.of[1][r / 16][t][r % 16]);
                store(out + r * kTileOutputs + t * kLanes,
                      dequantize_bytes(high, low, w, tile * kTileOutputs + t * kLanes, x.scale()[row + r]));
            }
        return out;
    }

  private:
    // Two register tiles of activations by the two of an output tile: four products for four loads.
    template <bool Ask>
    static void multiply_tiles(const uint8_t* first, const uint8_t* second, const char* weights, size_t steps, Ahead ahead,
                               int32_t (*first_sums)[16], int32_t (*second_sums)[16], bool begin) {
        if (begin) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        } else {
            _tile_loadd(0, first_sums, 64); _tile_loadd(1, first_sums + 16, 64);
            _tile_loadd(2, second_sums, 64); _tile_loadd(3, second_sums + 16, 64);
        }
        for (size_t step = 0; step < steps; step++, weights += kRegisterTiles * kRegisterTileBytes) {
            if (Ask)
                for (size_t line = 0; line < ahead.lines; line++, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
            _tile_loadd(6, weights, 64);
            _tile_loadd(4, first + step * Quantized::kStepBytes, Quantized::kStep);
            _tile_dpbusd(0, 4, 6);
            _tile_loadd(7, weights + kRegisterTileBytes, 64);
            _tile_dpbusd(1, 4, 7);
            _tile_loadd(5, second + step * Quantized::kStepBytes, Quantized::kStep);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(0, first_sums, 64); _tile_stored(1, first_sums + 16, 64);
        _tile_stored(2, second_sums, 64); _tile_stored(3, second_sums + 16, 64);
    }
#endif
};

}  // namespace llama
