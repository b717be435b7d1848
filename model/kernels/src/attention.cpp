// Causal attention of a packed, ragged batch over the paged KV-cache. Blocks are read in place.
//
// Flash attention (Dao et al. 2022, arXiv 2205.14135) computes one tile of keys after the other, and stores the scores
// of one tile only. Tiles begin at multiples of TILE positions. A new partial sum begins every SPLIT positions, and is
// joined to the sums of earlier positions (Flash-Decoding; Dao et al. 2023).
//
// The order of a token's sums thus depends only on its position. Results are bitwise identical for any other sequences
// in the batch, any number of threads and any chunking of the prompt, and whether a token is decoded or part of a
// prompt.
#include <type_traits>

#include "attention_few_queries.h"
#include "attention_tasks.h"
#include "kernel.h"

namespace kvasir {

// T: type of queries, new keys and values, and outputs. C: type of the cache.
template <typename T, typename C = T>
class Attention : Planner {
    using A = Arithmetic<C>;
    using Term = typename A::Term;

public:
    Attention(const Batch& batch, const Layer& layer)
        : Planner(batch, layer), num_terms((size + A::PER_TERM - 1) / A::PER_TERM),
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
    const int num_terms;
    const int64_t token_size;  // numbers of one token's keys in the cache

    // Writes this step's keys and values to the cache; must run before the cache is read.
    void write() {
        for (int64_t token = 0; token < batch.num_tokens; ++token) {
            const int64_t to = batch.slots[token] * token_size;
            const T* key = static_cast<const T*>(layer.k) + token * layer.k_stride;
            const T* value = static_cast<const T*>(layer.v) + token * layer.v_stride;
            put(key, token_size, static_cast<C*>(layer.keys) + to);
            put(value, token_size, static_cast<C*>(layer.values) + to);
        }
    }

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

    // Returns the offset of one row of a key/value head in queries or output.
    int64_t place(int64_t sequence, int head, int row, int64_t stride) const {
        return (batch.query_starts[sequence] + row / group) * stride + (head * group + row % group) * layer.head_size;
    }

    void finish(int64_t sequence, int head, int row, const Softmax& softmax, const float* sums) const {
        T* out = static_cast<T*>(layer.out) + place(sequence, head, row, layer.num_heads * layer.head_size);
        const Lanes share = splat(1.f / softmax.total);
        for (int offset = 0; offset < size; offset += LANES) {
            Arithmetic<T>::store_output(out + offset, mul(load(sums + offset), share), std::min(LANES, size - offset));
        }
    }

    // Makes the tile of a task that begins at position start.
    void find(const Task& task, int64_t start, Tile<C>& tile) const {
        const int64_t sequence = task.sequence, from = from_of(task), to = to_of(task);
        tile.task = &task;
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
                      array.template operator()<Term>(all * TILE / A::PER_TERM),
                      array.template operator()<float>(all * TILE),
                      array.template operator()<float>(static_cast<int64_t>(all) * width),
                      array.template operator()<float>(static_cast<int64_t>(all) * width),
                      array.template operator()<float>(all),
                      array.template operator()<Softmax>(all),
                      array.template operator()<Softmax>(all)};
            if (time == 0) memory = scratch.of(static_cast<size_t>(array.at - memory));
        }
        return arrays;
    }

    // Copies rows of queries in the order the products read: [head][row][term]. An odd size is padded with a zero.
    void load_queries(const Task& task, Term* queries) const {
        for (int head = task.first_head; head < task.end_head; ++head) {
            for (int row = task.first_row; row < task.end_row; ++row, queries += num_terms) {
                const T* from = static_cast<const T*>(layer.q) + place(task.sequence, head, row, layer.q_stride);
                queries[num_terms - 1] = 0;
                if constexpr (A::PER_TERM == 1) {
                    for (int number = 0; number < size; ++number) queries[number] = to_float(from[number]);
                } else {
                    std::memcpy(queries, from, static_cast<size_t>(size) * sizeof(T));
                }
            }
        }
    }

    // The range of positions that any row of a task sees, within the task's splits: from_of, and to_of (exclusive).
    int64_t from_of(const Task& task) const {
        return std::max(first_seen(position_of(task.sequence, task.first_row)), task.first_split * SPLIT);
    }
    int64_t to_of(const Task& task) const {
        return std::min(position_of(task.sequence, task.end_row - 1) + 1, task.end_split * SPLIT);
    }

    // Makes the tile that follows `tile`: in the same task, else the first of task `next`. None after the last tile of
    // `next`.
    void find_next(const Tile<C>& tile, const Task* next, Tile<C>& following) const {
        following.task = nullptr;
        if (tile.task == nullptr) return;
        if (tile.start + TILE < to_of(*tile.task)) {
            find(*tile.task, tile.start + TILE, following);
        } else if (next != nullptr && tile.task != next) {
            find(*next, from_of(*next) / TILE * TILE, following);
        }
    }

    void compute(const Task& task, const Task* next) {
        const Arrays arrays = cut(task);
        load_queries(task, arrays.queries);
        const int all = (task.end_row - task.first_row) * (task.end_head - task.first_head);
        std::fill(arrays.softmax, arrays.softmax + all, Softmax{});
        std::fill(arrays.sums, arrays.sums + static_cast<int64_t>(all) * width, 0.f);
        Tile<C> tiles[3];
        Tile<C> *tile = &tiles[0], *next_tile = &tiles[1], *third = &tiles[2];
        find(task, from_of(task) / TILE * TILE, *tile);
        find_next(*tile, next, *next_tile);
        lay(*tile, *next_tile);
        const bool few = is_few<C>(task.end_row - task.first_row, size);
        Stream<C> ahead;
        if (few) ahead.begin(&tile->keys);
        bool is_first = true;
        for (int64_t split = tile->start / SPLIT; tile->task == &task; ++split, is_first = false) {
            // The first split sums directly into arrays.sums. Later splits sum into part_sums, and are joined.
            float* sums = is_first ? arrays.sums : arrays.part_sums;
            Softmax* softmax = is_first ? arrays.softmax : arrays.part;
            if (!is_first) {
                std::fill(softmax, softmax + all, Softmax{});
                std::fill(sums, sums + static_cast<int64_t>(all) * width, 0.f);
            }
            while (tile->task == &task && tile->start < (split + 1) * SPLIT) {
                find_next(*next_tile, next, *third);
                lay(*next_tile, *third);
                if (few) {
                    attend_few(*tile, arrays, sums, softmax, ahead);
                } else {
                    attend(*tile, arrays, sums, softmax, *next_tile);
                }
                Tile<C>* done = tile;
                tile = next_tile, next_tile = third, third = done;
            }
            for (int row = 0; !is_first && row < all; ++row) {
                join(arrays.softmax[row], arrays.sums + row * width, softmax[row], sums + row * width, width);
            }
        }
        deliver(task, arrays);
    }

    // Sets the spans of a tile's keys and values, and links them to the spans that are read next.
    void lay(Tile<C>& tile, Tile<C>& following) const {
        if (tile.task == nullptr) return;
        const int64_t from = tile.task->first_head * layer.head_size;
        const auto numbers = static_cast<int>(tile.task->end_head * layer.head_size - from);
        const bool is_end = following.task == nullptr;
        const int64_t* later = is_end ? nullptr : following.at;
        following.keys.num_tokens = following.values.num_tokens = 0;  // until lay is called for this tile
        tile.keys = {static_cast<const C*>(layer.keys) + from, tile.at, later, tile.num_tokens, numbers, &tile.values};
        tile.values = {static_cast<const C*>(layer.values) + from, tile.at, later, tile.num_tokens, numbers,
                       is_end ? nullptr : &following.keys};
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

    // Computes one tile for all rows of all heads of a task, and prefetches the next tile.
    void attend(const Tile<C>& tile, const Arrays& arrays, float* sums, Softmax* softmax, const Tile<C>& next) const {
        const Task& task = *tile.task;
        const int rows = task.end_row - task.first_row, heads = task.end_head - task.first_head;
        const int num_groups = (tile.num_tokens + LANES - 1) / LANES;
        for (int head = 0; head < heads; ++head) {
            const int64_t from = head * layer.head_size;
            // Prefetches a share of the next tile's tokens, each with all its heads, in memory order.
            const int num_next = next.task == nullptr ? 0 : next.num_tokens;
            Ahead<C> ahead{next.keys.pool, next.values.pool, next.at, num_next * head / heads,
                           num_next * (head + 1) / heads, next.keys.size, 0};
            const int first = head * rows;
            pack_keys<C>(tile.keys.pool + from, tile.at, num_groups, size, arrays.keys, ahead);
            multiply<A>(arrays.queries + static_cast<int64_t>(first) * num_terms, num_terms, rows, arrays.keys, TILE,
                        num_terms, arrays.products, TILE, num_groups, nullptr, ahead);
            weigh_rows(tile, head, arrays.products, arrays.weights, arrays.factors, softmax + first);
            pack_values<C>(tile.values.pool + from, tile.at, tile.num_tokens, size, width, arrays.values, ahead);
            multiply<A>(arrays.weights, TILE / A::PER_TERM, rows, arrays.values, width,
                        (tile.num_tokens + A::PER_TERM - 1) / A::PER_TERM, sums + static_cast<int64_t>(first) * width,
                        width, width / LANES, arrays.factors, ahead);
            while (ahead.token < ahead.end_token) ahead.ask();
        }
    }

    // Computes the same for few rows: keys of all heads, all weights, then values of all heads. Memory is read nearly
    // in order.
    void attend_few(const Tile<C>& tile, const Arrays& arrays, float* sums, Softmax* softmax, Stream<C>& ahead) const {
        const Task& task = *tile.task;
        const int rows = task.end_row - task.first_row, heads = task.end_head - task.first_head;
        const int num_groups = (tile.num_tokens + LANES - 1) / LANES, stride = TILE / A::PER_TERM;
        with_rows(rows, [&](auto m) {
            constexpr int M = decltype(m)::value;
            for (int number = 0; number < num_groups * heads; ++number) {
                const int start = number / heads * LANES, head = number % heads;
                multiply_keys<M>(arrays.queries + head * M * num_terms, tile.keys.pool + head * size, tile.at + start,
                                 size, arrays.products + head * M * TILE + start, ahead);
            }
            for (int head = 0, first = 0; head < heads; ++head, first += M) {
                weigh_rows(tile, head, arrays.products + first * TILE, arrays.weights + first * stride,
                           arrays.factors + first, softmax + first);
            }
            for (int start = 0; start < tile.num_tokens; start += A::VALUES_AT_ONCE) {
                for (int head = 0, first = 0; head < heads; ++head, first += M) {
                    multiply_values<M>(arrays.weights + first * stride + start / A::PER_TERM,
                                       tile.values.pool + head * size, tile.at + start,
                                       std::min(A::VALUES_AT_ONCE, tile.num_tokens - start), size, sums + first * width,
                                       start == 0 ? arrays.factors + first : nullptr, ahead);
                }
            }
        });
    }

    // Turns the products of one head into weights. head: index relative to the task's first head.
    void weigh_rows(const Tile<C>& tile, int head, const float* products, Term* weights, float* factors,
                    Softmax* softmax) const {
        const Task& task = *tile.task;
        const int num_groups = (tile.num_tokens + LANES - 1) / LANES;
        for (int row = 0; row < task.end_row - task.first_row; ++row) {
            const int64_t position = position_of(task.sequence, task.first_row + row);
            const auto seen_from = static_cast<int>(std::clamp<int64_t>(first_seen(position) - tile.start, 0, TILE));
            const auto seen_to = static_cast<int>(std::clamp<int64_t>(position + 1 - tile.start, 0, TILE));
            const int query_head = (task.first_head + head) * group + (task.first_row + row) % group;
            factors[row] = weigh<A>(products + row * TILE, num_groups, seen_from, seen_to, layer.scale * LOG2_E,
                                    bias_of(query_head, position, tile.start), softmax[row],
                                    weights + row * (TILE / A::PER_TERM));
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

KVASIR_KERNEL void kvasir_attention_float32_over_float16(const kvasir::Batch* batch, const kvasir::Layer* layer) {
    kvasir::Attention<float, kvasir::half>(*batch, *layer).run();
}

KVASIR_KERNEL void kvasir_attention_bfloat16(const kvasir::Batch* batch, const kvasir::Layer* layer) {
    kvasir::Attention<kvasir::bf16>(*batch, *layer).run();
}

// Callers must check this before they call an attention kernel: kernels do not check indices.
KVASIR_KERNEL bool kvasir_is_within_cache(const kvasir::Batch* batch) { return kvasir::is_within_cache(*batch); }
