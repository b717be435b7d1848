// Division of an attention step into tasks.
#pragma once

#include <vector>

#include "attention_parts.h"

namespace kvasir {

class Planner {
protected:
    Planner(const Batch& batch, const Layer& layer)
        : batch(batch), layer(layer), size(static_cast<int>(layer.head_size)), width(round_up(size, LANES)),
          group(static_cast<int>(layer.num_heads / layer.num_kv_heads)) {}

    const Batch& batch;
    const Layer& layer;
    const int size, width, group;
    std::vector<Task> tasks;
    std::vector<SplitSequence> split_sequences;
    std::vector<float> partials;

    int64_t num_queries(int64_t sequence) const {
        return batch.query_starts[sequence + 1] - batch.query_starts[sequence];
    }
    int64_t position_of(int64_t sequence, int row) const {
        return batch.context_lengths[sequence] - num_queries(sequence) + row / group;
    }
    int64_t first_seen(int64_t position) const {
        return layer.window == 0 ? 0 : std::max<int64_t>(0, position - layer.window + 1);
    }

    // Makes at least three tasks per thread where possible. If there are few sequences, tasks divide the heads of a
    // sequence. If that is not enough, tasks also divide the splits of a sequence.
    void plan() {
        const int heads = static_cast<int>(layer.num_kv_heads);
        const int64_t wanted = layer.threads > 1 ? 3 * layer.threads : 1;
        const int64_t pieces = std::min<int64_t>(heads, (wanted + batch.num_sequences - 1) / batch.num_sequences);
        const bool splits = wanted > batch.num_sequences * pieces;
        int64_t partial_size = 0;
        for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
            const int num_rows = static_cast<int>(num_queries(sequence)) * group;
            const int64_t first_split = first_seen(position_of(sequence, 0)) / SPLIT;
            const int64_t end_split = (batch.context_lengths[sequence] + SPLIT - 1) / SPLIT;
            const bool is_chunk = num_rows > std::max(group, MOST_ROWS);
            const int64_t parts = is_chunk ? heads : pieces;
            const bool is_split = splits && num_rows <= MOST_ROWS && end_split - first_split > 1;
            const int64_t split_size = heads * num_rows * partial_stride();
            for (int64_t part = 0; part < parts; ++part) {
                const int first_head = static_cast<int>(heads * part / parts);
                const int end_head = static_cast<int>(heads * (part + 1) / parts);
                // The last rows see the most keys. They come first, because the longest tasks should start first.
                for (int row = (num_rows - 1) / MOST_ROWS * MOST_ROWS; row >= 0; row -= MOST_ROWS) {
                    Task task{sequence, row, std::min(num_rows, row + MOST_ROWS), first_head, end_head,
                              first_split, end_split, -1};
                    if (!is_split) tasks.push_back(task);
                    for (int64_t split = first_split; is_split && split < end_split; ++split) {
                        task.first_split = split, task.end_split = split + 1;
                        task.partial = partial_size + (split - first_split) * split_size +
                                       first_head * num_rows * partial_stride();
                        tasks.push_back(task);
                    }
                }
            }
            if (is_split) {
                split_sequences.push_back({sequence, partial_size, end_split - first_split});
                partial_size += (end_split - first_split) * split_size;
            }
        }
        partials.resize(static_cast<size_t>(partial_size));
    }

    // Size of a row in `partials`: the largest score, the total, then the sums.
    int64_t partial_stride() const { return width + 2; }
};

}  // namespace kvasir
