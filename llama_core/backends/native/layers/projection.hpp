// Cuts a product into tasks, and computes a task: row panels and K slices on tile registers, else blocks of rows.
//
// An epilogue takes each result while it is in the cache: epilogue(row, output tile of the product, float out[kTileOutputs]).
#pragma once

#include <algorithm>
#include <vector>

#include "linear.hpp"

namespace llama {

// Rows `row` .. `row + rows` of x times `tiles` output tiles of w from `tile`.
template <class T>
struct Product {
    const Linear<T>& w;
    const Inputs<T>& x;
    int rows, row = 0, tile = 0, tiles = w.output_tiles();
};

template <class T>
class Projection {
  public:
    explicit Projection(int threads) : threads_(threads) {}

    // `max_rows`: of a layer in one step.
    void reserve(int max_rows) {
        constexpr size_t bytes = size_t(kMaxTilesPerTask) * kSlicedPanel * kTileOutputs * sizeof(float);
        if (!in_row_panels(max_rows) || !sums_.empty()) return;
        for (int i = 0; i < threads_; i++) sums_.emplace_back(bytes);
    }

    size_t working_bytes() const {
        size_t total = 0;
        for (const Memory& sums : sums_) total += sums.bytes();
        return total;
    }

    int tasks_of(const Product<T>& p) const {
        if (in_row_panels(p.rows)) return num_task_tiles(p) * ((p.rows + row_panel(p) - 1) / row_panel(p));
        if (in_streams(p.rows)) return stream_tasks(p) + p.tiles - stream_tasks(p) * kStreams;
        return p.tiles * ((p.rows + part_rows(p.w) - 1) / part_rows(p.w));
    }

    template <class Epilogue>
    void run(const Product<T>& p, int task, int thread, const Epilogue& epilogue) const {
        if constexpr (kTilesOfT)
            if (in_row_panels(p.rows)) return run_row_panel(p, task, thread, epilogue);
        if (in_streams(p.rows)) return run_streams(p, task, epilogue);
        alignas(64) float out[kMaxRows * kTileOutputs];
        const int tile = tile_of(task % p.tiles, p.tiles), part = task / p.tiles;
        const int begin = p.row + part * part_rows(p.w), end = std::min(p.row + p.rows, begin + part_rows(p.w));
        for (int row = begin; row < end; row += kMaxRows) {
            const int count = std::min(kMaxRows, end - row);
            p.w.format().multiply(p.w, p.x, row, count, p.tile + tile, row == begin, out);
            for (int r = 0; r < count; r++) epilogue(row + r, tile, out + r * kTileOutputs);
        }
    }

  private:
    // Memory is too slow for the tile registers unless their operands lie in the first-level cache: a task multiplies one K
    // slice of an output tile with all rows of a panel before it begins the next slice.
    static constexpr int kSlicedPanel = 512;
    static constexpr int kMaxTilesPerTask = 8;  // a task reads its rows from the cache once for all of its output tiles
#if defined(LLAMA_AMX)
    static constexpr bool kTilesOfT = sizeof(T) == 2;
#else
    static constexpr bool kTilesOfT = false;
#endif
    // Threads mostly take tasks in turn, so each one's next output tile follows its last in memory: kernels prefetch beyond a tile.
    int tile_of(int turn, int tiles) const {
        const int each = tiles / threads_;
        return turn < each * threads_ ? turn % threads_ * each + turn / threads_ : turn;
    }

    static bool in_streams(int rows) { return rows <= kStreamRows; }
    // Of kStreams output tiles each. A task for each of the remaining tiles comes after them.
    int stream_tasks(const Product<T>& p) const { return p.tiles / (threads_ * kStreams) * threads_; }

    // Each thread has kStreams runs of output tiles, and each of its tasks the next tile of every run.
    template <class Epilogue>
    void run_streams(const Product<T>& p, int task, const Epilogue& epilogue) const {
        static_assert(kStreams * kStreamRows <= kMaxRows);
        alignas(64) float out[kMaxRows * kTileOutputs];
        const int tasks = stream_tasks(p), run = tasks / threads_;
        if (task >= tasks) {
            const int tile = tasks * (kStreams - 1) + task;
            p.w.format().multiply(p.w, p.x, p.row, p.rows, p.tile + tile, true, out);
            for (int r = 0; r < p.rows; r++) epilogue(p.row + r, tile, out + r * kTileOutputs);
            return;
        }
        const int tile = task % threads_ * run * kStreams + task / threads_;
        p.w.format().multiply_streams(p.w, p.x, p.row, p.rows, p.tile + tile, run, out);
        for (int s = 0; s < kStreams; s++)
            for (int r = 0; r < p.rows; r++) epilogue(p.row + r, tile + s * run, out + (s * p.rows + r) * kTileOutputs);
    }

    // Bytes of rows that stay in a core's cache while the weights are read.
    static constexpr size_t kPartBytes = 1 << 20;

    static int part_rows(const Linear<T>& w) {
        const size_t row = w.inputs() * (w.format().input_form == InputForm::kDense ? sizeof(T) : 2);
        return int(std::clamp<size_t>(kPartBytes / row / kMaxRows * kMaxRows, 2 * kMaxRows, 512));
    }

    static bool in_row_panels(int rows) { return kTilesOfT && rows > 2 * kMaxRows; }
    // With fewer output tiles in a task, slices save less than it costs to read the rows again.
    bool in_k_slices(const Product<T>& p) const {
        return p.w.format().add_k_slice && tiles_per_task(p) >= kMaxTilesPerTask / 2;
    }
    int row_panel(const Product<T>& p) const { return in_k_slices(p) ? kSlicedPanel : part_rows(p.w); }
    int tiles_per_task(const Product<T>& p) const { return std::clamp(p.tiles / (threads_ * 4), 1, kMaxTilesPerTask); }
    int num_task_tiles(const Product<T>& p) const { return (p.tiles + tiles_per_task(p) - 1) / tiles_per_task(p); }

    template <class Epilogue>
    void run_row_panel(const Product<T>& p, int task, int thread, const Epilogue& epilogue) const {
        const Linear<T>& w = p.w;
        const Inputs<T>& x = p.x;
        const WeightFormat<T>& format = w.format();
        const bool sliced = in_k_slices(p);
        const int begin = p.row + task / num_task_tiles(p) * row_panel(p), end = std::min(p.row + p.rows, begin + row_panel(p));
        const int first = p.tile + task % num_task_tiles(p) * tiles_per_task(p),
                  last = std::min(p.tile + p.tiles, first + tiles_per_task(p));
        const size_t k_slice = sliced ? format.slice_inputs : w.padded();
        const size_t slice_bytes = w.offset(k_slice);
        const size_t blocks = (end - begin + kMaxRows - 1) / kMaxRows, share = round_up(slice_bytes / blocks, 64);
        const size_t block_bytes = size_t(kMaxRows) * kTileOutputs * sizeof(float);
        alignas(64) float out[kMaxRows * kTileOutputs];
        alignas(64) char expanded[kMaxExpandedBytes];
        auto sums = [&](int tile, int row) {
            return sums_[thread].template as<char>() +
                   ((tile - first) * (row_panel(p) / kMaxRows) + (row - begin) / kMaxRows) * block_bytes;
        };
        auto epilogue_all = [&](int row, int count, int tile, const float* results) {
            for (int r = 0; r < count; r++) epilogue(row + r, tile - p.tile, results + r * kTileOutputs);
        };
        for (size_t from = 0, at = 0; from < w.padded(); from += k_slice, at += slice_bytes)
            for (int tile = first; tile < last; tile++) {
                // Prefetch the next weights while these are used.
                const size_t to = std::min(w.padded(), from + k_slice);
                const char* slice = w.output_tile(tile) + at;
                if (sliced && format.expand) {
                    format.expand(w, tile, from, to, expanded);
                    slice = expanded;
                }
                const char* ahead = tile + 1 < last ? w.output_tile(tile + 1) + at : w.output_tile(first) + at + slice_bytes;
                for (int row = begin; row < end; row += kMaxRows, ahead += share) {
                    const int count = std::min(kMaxRows, end - row);
                    for (size_t line = 0; line < share; line += 64) __builtin_prefetch(ahead + line, 0, 2);
                    if (sliced) {
                        format.add_k_slice(w, x, row, count, tile, from, to, slice, sums(tile, row));
                    } else {
                        format.multiply(w, x, row, count, tile, false, out);
                        epilogue_all(row, count, tile, out);
                    }
                }
            }
        if (!sliced) return;
        for (int row = begin; row < end; row += kMaxRows)
            for (int tile = first; tile < last; tile++) {
                const int count = std::min(kMaxRows, end - row);
                epilogue_all(row, count, tile, format.finish(w, x, row, count, tile, sums(tile, row), out));
            }
    }

    const int threads_;
    std::vector<Memory> sums_;  // of each thread: sums of a row panel between K slices
};

}  // namespace llama
