// Linear layers y = x W^T on packed weights, for one row as for hundreds.
//
// W [n, k] is cut into groups of 32 outputs. Within a group, weights lie in the order in which they are used, so one row reads
// memory as one stream. Every result is summed over k in one fixed order, whatever else is computed beside it: a row's
// values do not depend on the number of rows. Which instructions do it is decided when this is compiled: AMX, AVX-512 or
// plain vectors.
//
//   float32    [group][k][32]
//   bfloat16   [group][k / 32][2 tiles][16 pairs of k][16 outputs][2]
//   int8       [group][k / 64][2 tiles][16 fours of k][16 outputs][4]
#pragma once

#include "amx_tiles.hpp"
#include "memory.hpp"
#include "quantized.hpp"
#include "simd.hpp"

namespace llama {

constexpr int kTiles = 2;            // of a group
constexpr int kGroup = kTiles * 16;  // outputs of a group
constexpr size_t kTileBytes = 1024;  // bfloat16 and int8: what one tile register holds

enum class Format { kFloat32, kBFloat16, kInt8 };

class Linear {
  public:
    Linear() = default;
    Linear(Format format, int outputs, int inputs)
        : format_(format), inputs_(inputs), groups_(int(round_up(outputs, kGroup) / kGroup)) {
        size_t unit = format == Format::kFloat32 ? 1 : format == Format::kBFloat16 ? 32 : 64;
        padded_ = round_up(inputs, unit);
        size_t element = format == Format::kFloat32 ? 4 : format == Format::kBFloat16 ? 2 : 1;
        group_bytes_ = padded_ * kGroup * element;
        memory_ = Memory(group_bytes_ * groups_);
        if (format == Format::kInt8) extra_ = Memory(size_t(groups_) * kGroup * 8);
    }

    Format format() const { return format_; }
    int inputs() const { return inputs_; }
    int groups() const { return groups_; }
    size_t bytes() const { return memory_.bytes() + extra_.bytes(); }
    char* group(int g) const { return memory_.as<char>() + g * group_bytes_; }
    float* scales() const { return extra_.as<float>(); }                               // int8: float [outputs]
    int32_t* sums() const { return extra_.as<int32_t>() + size_t(groups_) * kGroup; }  // int8: of each output's weights

    // Packs one row of W, `source` [inputs], as output `output`.
    template <class T>
    void pack(const T* source, int output) {
        char* base = group(output / kGroup);
        const int place = output % kGroup, tile = place / 16, lane = place % 16;
        if (format_ == Format::kFloat32) {
            float* out = reinterpret_cast<float*>(base) + place;
            for (int k = 0; k < inputs_; k++) out[size_t(k) * kGroup] = widen(source[k]);
        } else if (format_ == Format::kBFloat16) {
            for (int k = 0; k < inputs_; k++) {
                bf16* line = reinterpret_cast<bf16*>(base + (k / 32 * kTiles + tile) * kTileBytes + k % 32 / 2 * 64);
                line[lane * 2 + k % 2] = narrow(widen(source[k]));
            }
        } else {
            float most = 0;
            for (int k = 0; k < inputs_; k++) most = std::max(most, std::fabs(widen(source[k])));
            const float inverse = most > 0 ? 127.0f / most : 0.0f;
            int32_t total = 0;
            for (int k = 0; k < inputs_; k++) {
                const int q = int(std::lrint(widen(source[k]) * inverse));
                int8_t* line = reinterpret_cast<int8_t*>(base + (k / 64 * kTiles + tile) * kTileBytes + k % 64 / 4 * 64);
                line[lane * 4 + k % 4] = int8_t(q);
                total += q;
            }
            scales()[output] = most / 127.0f;
            sums()[output] = total;
        }
    }

    // y of one group for rows <= kMaxRows of x; into `out` [kMaxRows][kGroup]. `first`: the group's weights come from memory, and
    // those behind them are wanted next.
    template <class T>
    void block(const Rows<T>& x, size_t row, int rows, int g, bool first, float* out) const;
    void block(const Quantized& x, size_t row, int rows, int g, bool first, float* out) const;

    // The same for many rows, where tile registers do it: inputs from .. to (whole tiles) are added to `sums` of up to kMaxRows
    // rows, which begin with from = 0; `finish` makes results of them.
    void add_slice(const Rows<bf16>& x, size_t row, int rows, int g, bool first, size_t from, size_t to, void* sums) const;
    void add_slice(const Quantized& x, size_t row, int rows, int g, bool first, size_t from, size_t to, void* sums) const;
    const float* finish(const Rows<bf16>& x, size_t row, int rows, int g, const void* sums, float* out) const;
    const float* finish(const Quantized& x, size_t row, int rows, int g, const void* sums, float* out) const;
    size_t sums_bytes() const { return size_t(kMaxRows) * kGroup * 4 * (format_ == Format::kInt8 ? 2 : 1); }

    size_t padded() const { return padded_; }
    size_t group_bytes() const { return group_bytes_; }

  private:
    Format format_ = Format::kFloat32;
    int inputs_ = 0, groups_ = 0;
    size_t padded_ = 0, group_bytes_ = 0;
    Memory memory_, extra_;
};

}  // namespace llama

#include "linear_kernels.hpp"
