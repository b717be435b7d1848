// Causal attention of a packed, ragged batch over the paged KV-cache: blocks are read where they lie.
//
// Flash attention (Dao et al. 2022, arXiv 2205.14135), a tile of keys after the other, with the scores of a tile alone
// ever stored. Tiles begin at multiples of TILE positions, and every SPLIT positions a new sum begins, which is joined
// to what was before (Flash-Decoding; Dao et al. 2023). So each token's order of sums follows from its position alone:
// its bits do not depend on other sequences, on threads, on how a prompt was cut into chunks, nor on whether a token
// was decoded or came with its prompt.
#include <type_traits>
#include <vector>

#include "attention_parts.h"
#include "kernel.h"

namespace kvasir {

template <typename T>
class Attention {
    using A = Arithmetic<T>;
    using Term = typename A::Term;

public:
    Attention(const Batch& batch, const Layer& layer)
        : batch(batch), layer(layer), size(static_cast<int>(layer.head_size)), width(round_up(size, LANES)),
          num_terms((size + A::PER_TERM - 1) / A::PER_TERM),
          group(static_cast<int>(layer.num_heads / layer.num_kv_heads)),
          token_size(layer.num_kv_heads * layer.head_size) {}

    void run() {
        write();
        plan();
        parallel_for(static_cast<int64_t>(tasks.size()), layer.threads, [&](int64_t index, int) {
            const int64_t next = index + std::max<int64_t>(1, layer.threads);
            compute(tasks[index], next < static_cast<int64_t>(tasks.size()) ? &tasks[next] : nullptr);
        });
        for (const SplitSequence& split : split_sequences) finish_splits(split);
    }

private:
    const Batch& batch;
    const Layer& layer;
    const int size, width, num_terms, group;
    const int64_t token_size;  // numbers of a cached token
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

    // This step's keys and values into the cache, before anything is read.
    void write() {
        const size_t bytes = static_cast<size_t>(token_size) * sizeof(T);
        for (int64_t token = 0; token < batch.num_tokens; ++token) {
            const int64_t to = batch.slots[token] * token_size;
            std::memcpy(static_cast<T*>(layer.keys) + to, static_cast<const T*>(layer.k) + token * layer.k_stride, bytes);
            std::memcpy(static_cast<T*>(layer.values) + to, static_cast<const T*>(layer.v) + token * layer.v_stride,
                        bytes);
        }
    }

    // Enough tasks for the threads: more of a sequence's heads apart where sequences are few, then its splits.
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
                // The last rows see most: what takes longest begins first.
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

    // A row's sums in `partials`, behind the largest score and the total.
    int64_t partial_stride() const { return width + 2; }

    void finish_splits(const SplitSequence& split) {
        const int num_rows = static_cast<int>(num_queries(split.sequence)) * group;
        const int64_t rows = layer.num_kv_heads * num_rows;
        for (int64_t row = 0; row < rows; ++row) {
            Softmax joined;
            float* sums = &partials[split.partial + row * partial_stride()] + 2;
            for (int64_t number = 0; number < split.num_splits; ++number) {
                const float* part = &partials[split.partial + (number * rows + row) * partial_stride()];
                join(joined, sums, {part[0], part[1]}, part + 2, width);
            }
            finish(split.sequence, static_cast<int>(row / num_rows), static_cast<int>(row % num_rows), joined, sums);
        }
    }

    // Where one row of a key/value head begins in queries or output.
    int64_t place(int64_t sequence, int head, int row, int64_t stride) const {
        return (batch.query_starts[sequence] + row / group) * stride + (head * group + row % group) * layer.head_size;
    }

    void finish(int64_t sequence, int head, int row, const Softmax& softmax, const float* sums) const {
        T* out = static_cast<T*>(layer.out) + place(sequence, head, row, layer.num_heads * layer.head_size);
        const Lanes share = splat(1.f / softmax.total);
        for (int offset = 0; offset < size; offset += LANES) {
            A::store_output(out + offset, mul(load(sums + offset), share), std::min(LANES, size - offset));
        }
    }

    // A tile's tokens: where they lie in the cache, in numbers; -1 for those that nobody in the task sees.
    struct Tile {
        int64_t start = -1;
        int num_tokens = 0;
        int64_t at[TILE];
    };

    void find(int64_t sequence, int64_t start, int64_t from, int64_t to, Tile& tile) const {
        tile.start = start;
        tile.num_tokens = static_cast<int>(std::min<int64_t>(TILE, to - start));
        const int64_t* table = batch.tables + sequence * batch.table_width;
        int64_t block = start / batch.block_size, offset = start % batch.block_size;
        for (int token = 0; token < TILE; ++token) {
            const bool is_seen = start + token >= from && start + token < to;
            tile.at[token] = is_seen ? (table[block] * batch.block_size + offset) * token_size : -1;
            if (++offset == batch.block_size) {
                offset = 0;
                ++block;
            }
        }
    }

    struct Arrays {
        Term *queries, *keys, *values, *weights;
        float *products, *sums, *part_sums, *factors;
        Softmax *softmax, *part;
    };

    Arrays cut(const Task& task) const {
        const int rows = task.end_row - task.first_row, all = rows * (task.end_head - task.first_head);
        Arrays arrays{};
        char* memory = nullptr;
        for (int time = 0; time < 2; ++time) {
            Cutter array{memory};
            arrays = {array.template operator()<Term>(static_cast<int64_t>(all) * num_terms),
                      array.template operator()<Term>(static_cast<int64_t>(round_up(num_terms, 4)) * TILE),
                      array.template operator()<Term>(TILE / A::PER_TERM * static_cast<int64_t>(width)),
                      array.template operator()<Term>(rows * TILE / A::PER_TERM),
                      array.template operator()<float>(rows * TILE),
                      array.template operator()<float>(static_cast<int64_t>(all) * width),
                      array.template operator()<float>(static_cast<int64_t>(all) * width),
                      array.template operator()<float>(rows),
                      array.template operator()<Softmax>(all),
                      array.template operator()<Softmax>(all)};
            if (time == 0) memory = scratch.of(static_cast<size_t>(array.at - memory));
        }
        return arrays;
    }

    // Rows of queries as the products read them: [head][row][term], zeros behind an odd size.
    void load_queries(const Task& task, Term* queries) const {
        for (int head = task.first_head; head < task.end_head; ++head) {
            for (int row = task.first_row; row < task.end_row; ++row, queries += num_terms) {
                queries[num_terms - 1] = 0;
                if constexpr (A::PER_TERM == 1) {
                    const T* from = static_cast<const T*>(layer.q) + place(task.sequence, head, row, layer.q_stride);
                    for (int number = 0; number < size; ++number) queries[number] = to_float(from[number]);
                } else {
                    const T* from = static_cast<const T*>(layer.q) + place(task.sequence, head, row, layer.q_stride);
                    std::memcpy(queries, from, static_cast<size_t>(size) * sizeof(T));
                }
            }
        }
    }

    // The positions that some row of a task sees.
    int64_t from_of(const Task& task) const { return first_seen(position_of(task.sequence, task.first_row)); }
    int64_t to_of(const Task& task) const { return position_of(task.sequence, task.end_row - 1) + 1; }

    // The task's first tile.
    void find_first(const Task& task, Tile& tile) const {
        const int64_t from = std::max(from_of(task), task.first_split * SPLIT);
        const int64_t to = std::min(to_of(task), task.end_split * SPLIT);
        find(task.sequence, from / TILE * TILE, from, to, tile);
    }

    void compute(const Task& task, const Task* next) {
        const Arrays arrays = cut(task);
        load_queries(task, arrays.queries);
        const int64_t from = from_of(task), to = std::min(to_of(task), task.end_split * SPLIT);
        const int all = (task.end_row - task.first_row) * (task.end_head - task.first_head);
        std::fill(arrays.softmax, arrays.softmax + all, Softmax{});
        std::fill(arrays.sums, arrays.sums + static_cast<int64_t>(all) * width, 0.f);
        Tile tiles[2];
        find_first(task, tiles[0]);
        bool is_first = true;
        for (int64_t split = tiles[0].start / SPLIT; split * SPLIT < to; ++split, is_first = false) {
            // The first split's sums are the whole so far; later ones are made beside it, and joined.
            float* sums = is_first ? arrays.sums : arrays.part_sums;
            Softmax* softmax = is_first ? arrays.softmax : arrays.part;
            if (!is_first) {
                std::fill(softmax, softmax + all, Softmax{});
                std::fill(sums, sums + static_cast<int64_t>(all) * width, 0.f);
            }
            while (tiles[0].start >= 0 && tiles[0].start < (split + 1) * SPLIT) {
                tiles[1].start = -1;
                if (tiles[0].start + TILE < to) {
                    find(task.sequence, tiles[0].start + TILE, from, to, tiles[1]);
                } else if (next != nullptr) {
                    find_first(*next, tiles[1]);
                }
                const bool is_last = tiles[0].start + TILE >= to;
                attend(task, tiles[0], arrays, sums, softmax, tiles[1], is_last && next != nullptr ? *next : task);
                if (is_last) break;
                std::swap(tiles[0], tiles[1]);
            }
            for (int row = 0; !is_first && row < all; ++row) {
                join(arrays.softmax[row], arrays.sums + row * width, softmax[row], sums + row * width, width);
            }
        }
        deliver(task, arrays);
    }

    void deliver(const Task& task, const Arrays& arrays) {
        int row_of_all = 0;
        for (int head = task.first_head; head < task.end_head; ++head) {
            for (int row = task.first_row; row < task.end_row; ++row, ++row_of_all) {
                const Softmax& softmax = arrays.softmax[row_of_all];
                const float* sums = arrays.sums + static_cast<int64_t>(row_of_all) * width;
                if (task.partial < 0) {
                    finish(task.sequence, head, row, softmax, sums);
                } else {
                    float* to = &partials[task.partial + row_of_all * partial_stride()];
                    to[0] = softmax.largest, to[1] = softmax.total;
                    std::copy(sums, sums + width, to + 2);
                }
            }
        }
    }

    // One tile against all rows of all heads of a task; meanwhile the next one is asked for.
    void attend(const Task& task, const Tile& tile, const Arrays& arrays, float* sums, Softmax* softmax,
                const Tile& next_tile, const Task& next_task) const {
        const int rows = task.end_row - task.first_row, heads = task.end_head - task.first_head;
        const int num_groups = (tile.num_tokens + LANES - 1) / LANES;
        const float scale = layer.scale * LOG2_E;
        const T *keys = static_cast<const T*>(layer.keys), *values = static_cast<const T*>(layer.values);
        for (int head = task.first_head; head < task.end_head; ++head) {
            const int64_t from = head * layer.head_size;
            // A share of the next tile's tokens, all heads of each, as they lie.
            const int share = head - task.first_head, num_next = next_tile.start < 0 ? 0 : next_tile.num_tokens;
            const int64_t next_from = next_task.first_head * layer.head_size;
            const auto next_size = static_cast<int>((next_task.end_head - next_task.first_head) * layer.head_size);
            Ahead<T> ahead{keys + next_from, values + next_from, next_tile.at, num_next * share / heads,
                           num_next * (share + 1) / heads, next_size, 0};
            const int first = (head - task.first_head) * rows;
            const Term* queries = arrays.queries + static_cast<int64_t>(first) * num_terms;
            float* head_sums = sums + static_cast<int64_t>(first) * width;
            const bool few = is_few<T>(rows, size);
            if (few) {
                with_rows(rows, [&](auto m) {
                    multiply_keys<decltype(m)::value>(queries, keys + from, tile.at, num_groups, size, arrays.products, ahead);
                });
            } else {
                pack_keys<T>(keys + from, tile.at, num_groups, size, arrays.keys, ahead);
                multiply<A>(queries, num_terms, rows, arrays.keys, TILE, num_terms, arrays.products, TILE, num_groups,
                            nullptr, ahead);
            }
            for (int row = 0; row < rows; ++row) {
                const int64_t position = position_of(task.sequence, task.first_row + row);
                const auto seen_from = static_cast<int>(std::clamp<int64_t>(first_seen(position) - tile.start, 0, TILE));
                const auto seen_to = static_cast<int>(std::clamp<int64_t>(position + 1 - tile.start, 0, TILE));
                arrays.factors[row] = weigh<A>(
                    arrays.products + row * TILE, num_groups, seen_from, seen_to, scale,
                    bias_of(head * group + (task.first_row + row) % group, position, tile.start), softmax[first + row],
                    arrays.weights + row * (TILE / A::PER_TERM));
            }
            if (few) {
                with_rows(rows, [&](auto m) {
                    multiply_values<decltype(m)::value>(arrays.weights, values + from, tile.at, tile.num_tokens, size,
                                                        head_sums, arrays.factors, ahead);
                });
            } else {
                pack_values<T>(values + from, tile.at, tile.num_tokens, size, width, arrays.values, ahead);
                multiply<A>(arrays.weights, TILE / A::PER_TERM, rows, arrays.values, width,
                            (tile.num_tokens + A::PER_TERM - 1) / A::PER_TERM, head_sums, width, width / LANES,
                            arrays.factors, ahead);
            }
            while (ahead.token < ahead.end_token) ahead.ask();
        }
    }

    const float* bias_of(int query_head, int64_t position, int64_t start) const {
        if (layer.bias == nullptr) return nullptr;
        return layer.bias + query_head * layer.bias_stride + layer.bias_length - 1 - position + start;
    }
};

bool is_within_cache(const Batch& batch) {
    bool is_within = true;
    const auto num_slots = static_cast<uint64_t>(batch.num_blocks * batch.block_size);
    for (int64_t token = 0; token < batch.num_tokens; ++token) {
        is_within &= static_cast<uint64_t>(batch.slots[token]) < num_slots;
    }
    for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
        is_within &= batch.context_lengths[sequence] <= batch.table_width * batch.block_size;
        for (int64_t place = 0; place < batch.table_width; ++place) {
            is_within &= static_cast<uint64_t>(batch.tables[sequence * batch.table_width + place]) <
                         static_cast<uint64_t>(batch.num_blocks);
        }
    }
    return is_within;
}

}  // namespace kvasir

KVASIR_KERNEL void kvasir_attention_float32(const kvasir::Batch* batch, const kvasir::Layer* layer) {
    kvasir::Attention<float>(*batch, *layer).run();
}

KVASIR_KERNEL void kvasir_attention_bfloat16(const kvasir::Batch* batch, const kvasir::Layer* layer) {
    kvasir::Attention<kvasir::bf16>(*batch, *layer).run();
}

// What asks for a kernel asks this first: kernels look at nothing.
KVASIR_KERNEL bool kvasir_is_within_cache(const kvasir::Batch* batch) { return kvasir::is_within_cache(*batch); }
