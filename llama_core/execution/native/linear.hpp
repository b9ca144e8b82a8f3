// Linear layers y = x W^T on packed weights, for one row as for hundreds.
//
// W [n, k] is cut into output tiles of 32 outputs. Within a tile, weights lie in the order in which they are used, so one row
// reads memory as one stream. Every result is summed over k in one fixed order, whatever is computed beside it: a row's values
// do not depend on the number of rows. The compiler's target decides the instructions: AMX, AVX-512 or plain vectors.
//
//   float32    [output tile][k][32]
//   bfloat16   [output tile][k / 32][2 register tiles][16 pairs of k][16 outputs][2]
//   int8       [output tile][k / 64][2 register tiles][16 fours of k][16 outputs][4]
#pragma once

#include "amx_tiles.hpp"
#include "memory.hpp"
#include "quantized.hpp"
#include "simd.hpp"

namespace llama {

constexpr int kRegisterTiles = 2;                  // of an output tile
constexpr int kTileOutputs = kRegisterTiles * 16;  // of an output tile
constexpr size_t kRegisterTileBytes = 1024;        // bfloat16 and int8: what one tile register holds

enum class Format { kFloat32, kBFloat16, kInt8 };

class Linear {
  public:
    Linear() = default;
    Linear(Format format, int outputs, int inputs)
        : format_(format), inputs_(inputs), output_tiles_(int(round_up(outputs, kTileOutputs) / kTileOutputs)) {
        size_t unit = format == Format::kFloat32 ? 1 : format == Format::kBFloat16 ? 32 : 64;
        padded_ = round_up(inputs, unit);
        size_t element = format == Format::kFloat32 ? 4 : format == Format::kBFloat16 ? 2 : 1;
        output_tile_bytes_ = padded_ * kTileOutputs * element;
        memory_ = Memory(output_tile_bytes_ * output_tiles_);
        if (format == Format::kInt8) extra_ = Memory(size_t(output_tiles_) * kTileOutputs * 8);
    }

    Format format() const { return format_; }
    int inputs() const { return inputs_; }
    int output_tiles() const { return output_tiles_; }
    size_t bytes() const { return memory_.bytes() + extra_.bytes(); }
    char* output_tile(int tile) const { return memory_.as<char>() + tile * output_tile_bytes_; }
    float* scales() const { return extra_.as<float>(); }  // int8: float [outputs]
    int32_t* sums() const {
        return extra_.as<int32_t>() + size_t(output_tiles_) * kTileOutputs;
    }  // int8: of each output's weights

    // Packs one row of W, `source` [inputs], as output `output`.
    template <class T>
    void pack(const T* source, int output) {
        char* base = output_tile(output / kTileOutputs);
        const int place = output % kTileOutputs, half = place / 16, lane = place % 16;
        if (format_ == Format::kFloat32) {
            float* out = reinterpret_cast<float*>(base) + place;
            for (int k = 0; k < inputs_; k++) out[size_t(k) * kTileOutputs] = widen(source[k]);
        } else if (format_ == Format::kBFloat16) {
            for (int k = 0; k < inputs_; k++) {
                bf16* line =
                    reinterpret_cast<bf16*>(base + (k / 32 * kRegisterTiles + half) * kRegisterTileBytes + k % 32 / 2 * 64);
                line[lane * 2 + k % 2] = narrow(widen(source[k]));
            }
        } else {
            float most = 0;
            for (int k = 0; k < inputs_; k++) most = std::max(most, std::fabs(widen(source[k])));
            const float inverse = most > 0 ? 127.0f / most : 0.0f;
            int32_t total = 0;
            for (int k = 0; k < inputs_; k++) {
                const int q = int(std::lrint(widen(source[k]) * inverse));
                int8_t* line =
                    reinterpret_cast<int8_t*>(base + (k / 64 * kRegisterTiles + half) * kRegisterTileBytes + k % 64 / 4 * 64);
                line[lane * 4 + k % 4] = int8_t(q);
                total += q;
            }
            scales()[output] = most / 127.0f;
            sums()[output] = total;
        }
    }

    // y of one output tile for rows <= kMaxRows of x, into `out` [kMaxRows][kTileOutputs]. `first`: the tile's weights come from
    // memory, and the weights behind them are prefetched.
    template <class T>
    void block(const Rows<T>& x, size_t row, int rows, int tile, bool first, float* out) const;
    void block(const Quantized& x, size_t row, int rows, int tile, bool first, float* out) const;

    // The same for a row panel on tile registers: the products of inputs from .. to (whole register tiles) are added to `sums` of
    // up to kMaxRows rows, which begin with from = 0; `finish` makes results of the sums.
    void add_k_slice(const Rows<bf16>& x, size_t row, int rows, int tile, bool first, size_t from, size_t to, void* sums) const;
    void add_k_slice(const Quantized& x, size_t row, int rows, int tile, bool first, size_t from, size_t to, void* sums) const;
    const float* finish(const Rows<bf16>& x, size_t row, int rows, int tile, const void* sums, float* out) const;
    const float* finish(const Quantized& x, size_t row, int rows, int tile, const void* sums, float* out) const;
    size_t sums_bytes() const { return size_t(kMaxRows) * kTileOutputs * 4 * (format_ == Format::kInt8 ? 2 : 1); }

    size_t padded() const { return padded_; }
    size_t output_tile_bytes() const { return output_tile_bytes_; }

  private:
    Format format_ = Format::kFloat32;
    int inputs_ = 0, output_tiles_ = 0;
    size_t padded_ = 0, output_tile_bytes_ = 0;
    Memory memory_, extra_;
};

}  // namespace llama

#include "linear_kernels.hpp"
