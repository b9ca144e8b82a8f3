// The tokens, the samples and the attention tasks of one step, from its rows.
#pragma once

#include <algorithm>
#include <vector>

#include "layers/kv_cache.hpp"
#include "step_abi.hpp"

namespace llama {

struct Token {
    int slot, position;
    bool ends_new_kv_tile;  // the row's last token, in a KV tile that the row begins
};
struct QueryTile {
    int slot, begin, end;  // tokens begin .. end of the step
};
struct Sample {
    int token, slot, position;  // after `token` of the step, for `position`
};

struct StepPlan {
    std::vector<Token> tokens;
    std::vector<QueryTile> query_tiles;
    std::vector<Sample> samples;
    int heads_per_task = 1;  // key/value heads that one attention task computes, one after the other

    // Later steps of these sizes allocate nothing: a step has no way to report that an allocation failed.
    void reserve(const Shape& s) {
        const size_t most = s.max_tokens;
        tokens.reserve(most), query_tiles.reserve(most), samples.reserve(std::max<size_t>(most, s.max_samples));
    }

    int num_tokens() const { return int(tokens.size()); }
    int num_samples() const { return int(samples.size()); }
    int attention_tasks(const Shape& s) const { return int(query_tiles.size()) * tasks_per_query_tile(s); }
    int tasks_per_query_tile(const Shape& s) const { return (s.kv_heads + heads_per_task - 1) / heads_per_task; }

    void plan(const Row* rows, int num_rows, const Shape& s) {
        tokens.clear();
        samples.clear();
        query_tiles.clear();
        int num = 0;
        for (int i = 0; i < num_rows; i++) num += rows[i].length;
        const int large = std::max(kQueryTile, kMostQueries * s.kv_heads / s.heads);
        for (int i = 0; i < num_rows; i++) add(rows[i], num * s.kv_heads < s.threads * 8 * large ? kQueryTile : large);
        // A task with several heads prefetches the next head's keys while it uses this head's. Every thread still gets tasks.
        heads_per_task = std::clamp(int(query_tiles.size()) * s.kv_heads / (s.threads * 8), 1, s.kv_heads);
    }

  private:
    static constexpr int kQueryTile = 16;  // tokens; kMostQueries queries where each thread then gets several tasks

    void add(const Row& row, int query_tile) {
        const int first = num_tokens();
        for (int i = 0; i < row.length; i++) tokens.push_back({row.slot, row.start + i, false});
        const int end = row.start + row.length - 1;
        tokens.back().ends_new_kv_tile = end / kKvTile * kKvTile >= row.start;
        for (int i = row.length - row.samples; i < row.length; i++) samples.push_back({first + i, row.slot, row.start + i + 1});
        // The last query tile comes first: it attends to the most positions, so it takes the longest.
        for (int to = row.length; to > 0; to -= query_tile) {
            const int from = std::max(0, to - query_tile);
            query_tiles.push_back({row.slot, first + from, first + to});
        }
    }
};

}  // namespace llama
