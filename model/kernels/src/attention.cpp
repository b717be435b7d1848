// Causal attention of a packed, ragged batch over the paged KV-cache. Blocks are read in place.
//
// Flash attention (Dao et al. 2022, arXiv 2205.14135) computes one tile of keys after the other. Tiles begin at
// multiples of TILE positions. A new partial sum begins every SPLIT positions, and is joined to the sums of earlier
// positions (Flash-Decoding; Dao et al. 2023). The order of a token's sums thus depends only on its position.
#include <vector>

#include "attention_tile.h"
#include "kernel.h"
#include "rows.h"

namespace kvasir {
namespace {

constexpr int SPLIT = 4 * TILE;
constexpr int MAX_TASK_ROWS = 192;
constexpr int BLOCK_ROWS = 24;  // rows whose products stay in a first-level cache; a multiple of ROWS
constexpr float LOG2_E = 1.44269504f;

// Ranges of query rows, key/value heads and splits of one sequence. A row is a token and one of the query heads that
// share a key/value head: token * group + head.
struct Task {
    int64_t sequence;
    int first_row, end_row, first_head, end_head;
    int64_t first_split, end_split;
    // Offset in `partials` for the sums of one split; -1: the task computes all its splits and writes the output.
    int64_t partial;

    int num_rows() const { return end_row - first_row; }
    int num_heads() const { return end_head - first_head; }
};

// A sequence with one or more tasks for each split. partial: offset of the sums in `partials`, [split][head][row].
struct SplitSequence {
    int64_t sequence, partial, num_splits;
};

// A tile of a task. at: offset of each token in the cache, in numbers; -1 for tokens that no row of the task sees.
// scale_at: for an int8 cache, offset of each token's scale for head 0; 0 for tokens that no row sees.
template <typename T>
struct Tile {
    const Task* task = nullptr;  // null: there is no tile
    int64_t start = 0;
    int num_tokens = 0;
    int64_t at[TILE], scale_at[TILE];
    Span<T> keys, values;
};

thread_local Scratch scratch;

// Adds the sums of later positions (part) to those of earlier positions (joined). A part without keys changes nothing.
void join(Softmax& joined, float* joined_sums, const Softmax& part, const float* part_sums, int width) {
    if (part.total == 0) return;
    if (joined.total == 0) {
        joined = part;
        std::copy(part_sums, part_sums + width, joined_sums);
        return;
    }
    const float most = std::max(joined.largest, part.largest);
    const float before = exp2(joined.largest - most), after = exp2(part.largest - most);
    for (int offset = 0; offset < width; offset += LANES) {
        const Lanes old = mul(load(joined_sums + offset), splat(before));
        store(joined_sums + offset, fma(load(part_sums + offset), splat(after), old));
    }
    joined.total = joined.total * before + part.total * after;
    joined.largest = most;
}

// Division of a step's attention into tasks.
class TaskPlan {
protected:
    TaskPlan(const AttentionBatch& batch, const AttentionCall& call)
        : batch(batch), call(call), size(static_cast<int>(call.head_size)), width(round_up(size, LANES)),
          group(static_cast<int>(call.num_heads / call.num_kv_heads)) {}

    const AttentionBatch& batch;
    const AttentionCall& call;
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
    int64_t first_visible(int64_t position) const {
        return call.window == 0 ? 0 : std::max<int64_t>(0, position - call.window + 1);
    }
    // The range of positions that any row of a task sees, within the task's splits.
    int64_t first_position(const Task& task) const {
        return std::max(first_visible(position_of(task.sequence, task.first_row)), task.first_split * SPLIT);
    }
    int64_t end_position(const Task& task) const {
        return std::min(position_of(task.sequence, task.end_row - 1) + 1, task.end_split * SPLIT);
    }
    // Size of a row in `partials`: the largest score, the total, then the sums.
    int64_t partial_stride() const { return width + 2; }

    int64_t first_split_of(int64_t sequence) const { return first_visible(position_of(sequence, 0)) / SPLIT; }
    int64_t end_split_of(int64_t sequence) const { return (batch.context_lengths[sequence] + SPLIT - 1) / SPLIT; }

    // Makes at least three tasks per thread where possible. A sequence with more than one task's share of the work gets
    // a task for each of its splits. If that is not enough, tasks also divide the heads of a sequence.
    void plan() {
        const int heads = static_cast<int>(call.num_kv_heads);
        const int64_t wanted = call.threads > 1 ? 3 * call.threads : 1;
        const int64_t share = (wanted + batch.num_sequences - 1) / batch.num_sequences;
        int64_t partial_size = 0, all_splits = 0;
        for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
            all_splits += end_split_of(sequence) - first_split_of(sequence);
        }
        for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
            const int num_rows = static_cast<int>(num_queries(sequence)) * group;
            const int64_t first_split = first_split_of(sequence), end_split = end_split_of(sequence);
            const int64_t splits = end_split - first_split;
            const bool is_chunk = num_rows > std::max(group, MAX_TASK_ROWS);
            const bool is_split = num_rows <= MAX_TASK_ROWS && splits > 1 && splits * wanted > all_splits;
            const int64_t pieces = is_split ? (share + splits - 1) / splits : share;
            const int64_t parts = is_chunk ? heads : std::min<int64_t>(heads, pieces);
            const int64_t split_size = heads * num_rows * partial_stride();
            for (int64_t part = 0; part < parts; ++part) {
                const int first_head = static_cast<int>(heads * part / parts);
                const int end_head = static_cast<int>(heads * (part + 1) / parts);
                // The last rows see the most keys. They come first, because the longest tasks should start first.
                for (int row = (num_rows - 1) / MAX_TASK_ROWS * MAX_TASK_ROWS; row >= 0; row -= MAX_TASK_ROWS) {
                    Task task{sequence, row, std::min(num_rows, row + MAX_TASK_ROWS), first_head, end_head,
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
                split_sequences.push_back({sequence, partial_size, splits});
                partial_size += splits * split_size;
            }
        }
        partials.resize(static_cast<size_t>(partial_size));
    }
};

// T: type of queries, new keys and values, and outputs. C: type of the cache.
template <typename T, typename C = T>
class Attention : TaskPlan {
    using A = Arithmetic<C>;
    using Term = typename A::Term;
    static constexpr bool HAS_SCALES = std::is_same_v<C, int8_t>;

public:
    Attention(const AttentionBatch& batch, const AttentionCall& call)
        : TaskPlan(batch, call), num_terms((size + A::PER_TERM - 1) / A::PER_TERM),
          token_size(call.num_kv_heads * call.head_size) {}

    void run() {
        write_cache();
        plan();
        parallel_for(static_cast<int64_t>(tasks.size()), call.threads, [&](int64_t index, int) {
            const int64_t next = index + std::max<int64_t>(1, call.threads);
            compute(tasks[index], next < static_cast<int64_t>(tasks.size()) ? &tasks[next] : nullptr);
        });
        for (const SplitSequence& split : split_sequences) join_splits(split);
    }

private:
    const int num_terms;
    const int64_t token_size;  // numbers of one token's keys in the cache

    // Writes this step's keys and values, if there are any, to the cache; must run before the cache is read.
    void write_cache() {
        if (call.k == nullptr) return;
        for (int64_t token = 0; token < batch.num_tokens; ++token) {
            const int64_t to = batch.slots[token] * token_size;
            const T* key = static_cast<const T*>(call.k) + token * call.k_stride;
            const T* value = static_cast<const T*>(call.v) + token * call.v_stride;
            if constexpr (HAS_SCALES) {
                const int64_t scale_at = scale_of(batch.slots[token] / batch.block_size,
                                                  batch.slots[token] % batch.block_size);
                for (int64_t head = 0; head < call.num_kv_heads; ++head) {
                    const int64_t from = head * size, at = scale_at + head * batch.block_size;
                    call.key_scales[at] = quantize(key + from, size, static_cast<C*>(call.keys) + to + from);
                    call.value_scales[at] = quantize(value + from, size, static_cast<C*>(call.values) + to + from);
                }
            } else {
                convert(key, token_size, static_cast<C*>(call.keys) + to);
                convert(value, token_size, static_cast<C*>(call.values) + to);
            }
        }
    }

    // Returns the offset of a token's scale for head 0.
    int64_t scale_of(int64_t block, int64_t offset) const {
        return block * call.num_kv_heads * batch.block_size + offset;
    }

    void join_splits(const SplitSequence& split) {
        const int num_rows = static_cast<int>(num_queries(split.sequence)) * group;
        const int64_t rows = call.num_kv_heads * num_rows;
        for (int64_t row = 0; row < rows; ++row) {
            Softmax joined;
            float* sums = &partials[split.partial + row * partial_stride()] + 2;
            for (int64_t number = 0; number < split.num_splits; ++number) {
                const float* part = &partials[split.partial + (number * rows + row) * partial_stride()];
                join(joined, sums, {part[0], part[1]}, part + 2, width);
            }
            write_output(split.sequence, static_cast<int>(row / num_rows), static_cast<int>(row % num_rows), joined,
                         sums);
        }
    }

    // Returns the offset of one row of a key/value head in queries or output.
    int64_t offset_of(int64_t sequence, int head, int row, int64_t stride) const {
        return (batch.query_starts[sequence] + row / group) * stride + (head * group + row % group) * call.head_size;
    }

    void write_output(int64_t sequence, int head, int row, const Softmax& softmax, const float* sums) const {
        T* out = static_cast<T*>(call.out) + offset_of(sequence, head, row, call.num_heads * call.head_size);
        const Lanes share = splat(1.f / softmax.total);
        for (int at = 0; at < size; at += LANES) store_up_to(out + at, mul(load(sums + at), share), size - at);
    }

    // Makes the tile of a task that begins at position start.
    void make_tile(const Task& task, int64_t start, Tile<C>& tile) const {
        const int64_t sequence = task.sequence, first = first_position(task), end = end_position(task);
        tile.task = &task;
        tile.start = start;
        tile.num_tokens = static_cast<int>(std::min<int64_t>(TILE, end - start));
        const int64_t* table = batch.tables + sequence * batch.table_width;
        int64_t block = start / batch.block_size, offset = start % batch.block_size;
        for (int token = 0; token < TILE; ++token) {
            const bool is_visible = start + token >= first && start + token < end;
            tile.at[token] = is_visible ? (table[block] * batch.block_size + offset) * token_size : -1;
            if constexpr (HAS_SCALES) {
                tile.scale_at[token] = is_visible ? scale_of(table[block], offset) : 0;
            }
            if (++offset == batch.block_size) {
                offset = 0;
                ++block;
            }
        }
        for (int token = 0; HAS_SCALES && token < tile.num_tokens; token += LANES) {  // they are read two tiles later
            for (int head = task.first_head; head < task.end_head; ++head) {
                const int64_t at = tile.scale_at[token] + head * batch.block_size;
                __builtin_prefetch(call.key_scales + at, 0, 3);
                __builtin_prefetch(call.value_scales + at, 0, 3);
            }
        }
    }

    // Copies the scales of a tile's tokens for one head.
    void load_scales(const float* scales, const Tile<C>& tile, int head, float* to) const {
        scales += head * batch.block_size;
        for (int token = 0; token < tile.num_tokens; token += LANES) {
            const int64_t* at = tile.scale_at + token;
            if (batch.block_size % LANES == 0 && at[LANES - 1] == at[0] + LANES - 1) {  // all in one block
                store(to + token, load(scales + at[0]));
                continue;
            }
            for (int lane = 0; lane < LANES; ++lane) to[token + lane] = scales[at[lane]];
        }
    }

    // Makes the tile that follows `tile`: in the same task, else the first of task `next`.
    void make_next_tile(const Tile<C>& tile, const Task* next, Tile<C>& following) const {
        following.task = nullptr;
        if (tile.task == nullptr) return;
        if (tile.start + TILE < end_position(*tile.task)) {
            make_tile(*tile.task, tile.start + TILE, following);
        } else if (next != nullptr && tile.task != next) {
            make_tile(*next, first_position(*next) / TILE * TILE, following);
        }
    }

    // Sets the spans of a tile's keys and values, and links them to the spans that are read next.
    void link(Tile<C>& tile, Tile<C>& following) const {
        if (tile.task == nullptr) return;
        const int64_t first = tile.task->first_head * call.head_size;
        const auto numbers = static_cast<int>(tile.task->end_head * call.head_size - first);
        const bool is_last = following.task == nullptr;
        const int64_t* next_at = is_last ? nullptr : following.at;
        following.keys.num_tokens = following.values.num_tokens = 0;  // until link is called for this tile
        tile.keys = {static_cast<const C*>(call.keys) + first, tile.at, next_at, tile.num_tokens, numbers,
                     &tile.values};
        tile.values = {static_cast<const C*>(call.values) + first, tile.at, next_at, tile.num_tokens, numbers,
                       is_last ? nullptr : &following.keys};
    }

    struct Arrays {
        Term *queries, *keys, *values, *weights;
        float *products, *sums, *part_sums, *factors;
        Softmax *softmax, *part;
    };

    // Divides this thread's scratch memory into arrays aligned to 64 bytes: first the total size, then the arrays.
    Arrays make_arrays(const Task& task) const {
        const int64_t rows = task.num_rows() * task.num_heads();
        Arrays arrays{};
        char* at = nullptr;
        const auto cut = [&](auto*& array, int64_t count) {
            array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
            at += (static_cast<size_t>(count) * sizeof *array + 63) / 64 * 64;
        };
        for (int time = 0; time < 2; ++time) {
            if (time == 1) at = scratch.reserve(reinterpret_cast<size_t>(at));
            cut(arrays.queries, rows * num_terms);
            cut(arrays.keys, round_up(num_terms, 4) * TILE);
            cut(arrays.values, TILE / A::PER_TERM * width);
            cut(arrays.weights, rows * TILE / A::PER_TERM);
            cut(arrays.products, rows * TILE);
            cut(arrays.sums, rows * width);
            cut(arrays.part_sums, rows * width);
            cut(arrays.factors, rows);
            cut(arrays.softmax, rows);
            cut(arrays.part, rows);
        }
        return arrays;
    }

    // Copies rows of queries as the products read them: [head][row][term]. An odd size is padded with a zero.
    void load_queries(const Task& task, Term* queries) const {
        for (int head = task.first_head; head < task.end_head; ++head) {
            for (int row = task.first_row; row < task.end_row; ++row, queries += num_terms) {
                const T* from = static_cast<const T*>(call.q) + offset_of(task.sequence, head, row, call.q_stride);
                queries[num_terms - 1] = 0;
                if constexpr (A::PER_TERM == 1) {
                    convert(from, size, queries);
                } else {
                    std::memcpy(queries, from, static_cast<size_t>(size) * sizeof(T));
                }
            }
        }
    }

    // Computes a task, and prefetches the first tile of the task that this thread will probably compute next.
    void compute(const Task& task, const Task* next) {
        const Arrays arrays = make_arrays(task);
        load_queries(task, arrays.queries);
        const int all = task.num_rows() * task.num_heads();
        const auto clear = [&](Softmax* softmax, float* sums) {
            std::fill(softmax, softmax + all, Softmax{});
            std::fill(sums, sums + static_cast<int64_t>(all) * width, 0.f);
        };
        clear(arrays.softmax, arrays.sums);
        Tile<C> tiles[3];
        Tile<C> *tile = &tiles[0], *next_tile = &tiles[1], *third = &tiles[2];
        make_tile(task, first_position(task) / TILE * TILE, *tile);
        make_next_tile(*tile, next, *next_tile);
        link(*tile, *next_tile);
        // Few rows are multiplied without packing if heads are whole registers.
        const bool is_few = task.num_rows() <= FEW_ROWS && size % (LANES * A::PER_TERM) == 0;
        SpanPrefetcher<C> prefetcher;
        if (is_few) prefetcher.begin(&tile->keys);
        bool is_first = true;
        for (int64_t split = tile->start / SPLIT; tile->task == &task; ++split, is_first = false) {
            // The first split sums directly into arrays.sums. Later splits sum into part_sums, and are joined.
            float* sums = is_first ? arrays.sums : arrays.part_sums;
            Softmax* softmax = is_first ? arrays.softmax : arrays.part;
            if (!is_first) clear(softmax, sums);
            while (tile->task == &task && tile->start < (split + 1) * SPLIT) {
                make_next_tile(*next_tile, next, *third);
                link(*next_tile, *third);
                if (is_few) {
                    attend_few(*tile, arrays, sums, softmax, prefetcher);
                } else {
                    attend_many(*tile, arrays, sums, softmax, *next_tile);
                }
                Tile<C>* done = tile;
                tile = next_tile, next_tile = third, third = done;
            }
            for (int row = 0; !is_first && row < all; ++row) {
                join(arrays.softmax[row], arrays.sums + row * width, softmax[row], sums + row * width, width);
            }
        }
        store_results(task, arrays);
    }

    // Writes the output of a task, or its partial sums if the task is one split.
    void store_results(const Task& task, const Arrays& arrays) {
        int index = 0;
        for (int head = task.first_head; head < task.end_head; ++head) {
            for (int row = task.first_row; row < task.end_row; ++row, ++index) {
                const Softmax& softmax = arrays.softmax[index];
                const float* sums = arrays.sums + static_cast<int64_t>(index) * width;
                if (task.partial < 0) {
                    write_output(task.sequence, head, row, softmax, sums);
                } else {
                    float* to = &partials[task.partial + index * partial_stride()];
                    to[0] = softmax.largest, to[1] = softmax.total;
                    std::copy(sums, sums + width, to + 2);
                }
            }
        }
    }

    // Computes one tile for all rows of all heads of a task, and prefetches the next tile.
    void attend_many(const Tile<C>& tile, const Arrays& arrays, float* sums, Softmax* softmax,
                     const Tile<C>& next) const {
        const int rows = tile.task->num_rows(), heads = tile.task->num_heads();
        const int num_groups = groups_of(tile.num_tokens);
        for (int head = 0; head < heads; ++head) {
            const int64_t from = head * call.head_size;
            // Prefetches a share of the next tile's tokens, each with all its heads, in memory order.
            const int num_next = next.task == nullptr ? 0 : next.num_tokens;
            TilePrefetcher<C> prefetcher{next.keys.pool, next.values.pool, next.at, num_next * head / heads,
                                         num_next * (head + 1) / heads, next.keys.size, 0};
            pack_keys<C>(tile.keys.pool + from, tile.at, num_groups, size, arrays.keys, prefetcher);
            pack_values<C>(tile.values.pool + from, tile.at, tile.num_tokens, size, width, arrays.values, prefetcher);
            for (int row = 0; row < rows; row += BLOCK_ROWS) {
                const int num_rows = std::min(BLOCK_ROWS, rows - row), first = head * rows + row;
                const int64_t last = position_of(tile.task->sequence, tile.task->first_row + row + num_rows - 1);
                const auto num_tokens = static_cast<int>(std::min<int64_t>(tile.num_tokens, last + 1 - tile.start));
                if (num_tokens <= 0) continue;
                multiply<A>(arrays.queries + static_cast<int64_t>(first) * num_terms, num_terms, num_rows, arrays.keys,
                            TILE, num_terms, arrays.products, TILE, groups_of(num_tokens), nullptr, prefetcher);
                compute_head_weights(tile, head, row, num_rows, num_tokens, arrays.products, arrays.weights,
                                     arrays.factors, softmax + first);
                multiply<A>(arrays.weights, TILE / A::PER_TERM, num_rows, arrays.values, width,
                            (num_tokens + A::PER_TERM - 1) / A::PER_TERM, sums + static_cast<int64_t>(first) * width,
                            width, width / LANES, arrays.factors, prefetcher);
            }
            while (prefetcher.token < prefetcher.end_token) prefetcher.prefetch();
        }
    }

    // Computes one tile for few rows: keys of all heads, all weights, then values of all heads, nearly in memory order.
    void attend_few(const Tile<C>& tile, const Arrays& arrays, float* sums, Softmax* softmax,
                    SpanPrefetcher<C>& prefetcher) const {
        const int heads = tile.task->num_heads(), stride = TILE / A::PER_TERM;
        const int num_groups = groups_of(tile.num_tokens);
        with_rows<FEW_ROWS>(tile.task->num_rows(), [&](auto m) {
            constexpr int M = decltype(m)::value;
            for (int number = 0; number < num_groups * heads; ++number) {
                const int start = number / heads * LANES, head = number % heads;
                multiply_keys<M>(arrays.queries + head * M * num_terms, tile.keys.pool + head * size, tile.at + start,
                                 size, arrays.products + head * M * TILE + start, prefetcher);
            }
            for (int head = 0, first = 0; head < heads; ++head, first += M) {
                compute_head_weights(tile, head, 0, M, tile.num_tokens, arrays.products + first * TILE,
                                     arrays.weights + first * stride, arrays.factors + first, softmax + first);
            }
            for (int start = 0; start < tile.num_tokens; start += A::VALUES_AT_ONCE) {
                for (int head = 0, first = 0; head < heads; ++head, first += M) {
                    multiply_values<M>(arrays.weights + first * stride + start / A::PER_TERM,
                                       tile.values.pool + head * size, tile.at + start,
                                       std::min(A::VALUES_AT_ONCE, tile.num_tokens - start), size, sums + first * width,
                                       start == 0 ? arrays.factors + first : nullptr, prefetcher);
                }
            }
        });
    }

    // Turns the products of some rows of one head into weights. head, first_row: indices relative to the task's first head
    // and row. With an int8 cache, the scales of keys multiply the products, and the scales of values multiply the weights.
    // Never inlined: GCC would make a copy for every number of rows.
    __attribute__((noinline, noclone)) void compute_head_weights(const Tile<C>& tile, int head, int first_row, int num_rows,
                                                                 int num_tokens, float* products, Term* weights,
                                                                 float* factors, Softmax* softmax) const {
        const Task& task = *tile.task;
        const int num_groups = groups_of(num_tokens);
        const bool is_capped = call.soft_cap > 0;
        const float scale = is_capped ? LOG2_E : call.scale * LOG2_E;
        float key_scales[TILE], value_scales[TILE];
        if constexpr (HAS_SCALES) {
            load_scales(call.key_scales, tile, task.first_head + head, key_scales);
            load_scales(call.value_scales, tile, task.first_head + head, value_scales);
        }
        // Most tiles are seen by all rows, which then need no positions.
        first_row += task.first_row;
        const bool is_whole = call.bias == nullptr &&
                              position_of(task.sequence, first_row) >= tile.start + TILE - 1 &&
                              first_visible(position_of(task.sequence, first_row + num_rows - 1)) <= tile.start;
        const auto visible_to = [&](int row) -> Visible {
            if (is_whole) return {0, TILE};
            const int64_t position = position_of(task.sequence, first_row + row);
            return {static_cast<int>(std::clamp<int64_t>(first_visible(position) - tile.start, 0, TILE)),
                    static_cast<int>(std::clamp<int64_t>(position + 1 - tile.start, 0, TILE))};
        };
        // A loop of its own finds the largest scores: in one loop, each row would wait for its largest score.
        for (int row = 0; row < num_rows; ++row) {
            float* of_row = products + row * TILE;
            for (int at = 0; HAS_SCALES && at < num_groups * LANES; at += LANES) {
                store(of_row + at, mul(load(of_row + at), load(key_scales + at)));
            }
            for (int at = 0; is_capped && at < num_groups * LANES; at += LANES) {
                store(of_row + at, soft_cap(load(of_row + at), call.scale / call.soft_cap, call.soft_cap));
            }
            if (is_whole) {
                factors[row] = update_largest<true>(of_row, GROUPS, {}, scale, nullptr, softmax[row]);
                continue;
            }
            const int query_head = (task.first_head + head) * group + (first_row + row) % group;
            const float* bias = call.bias == nullptr ? nullptr
                                                     : call.bias + query_head * call.bias_stride + call.bias_length - 1 -
                                                           position_of(task.sequence, first_row + row) + tile.start;
            factors[row] = update_largest<false>(of_row, num_groups, visible_to(row), scale, bias, softmax[row]);
        }
        const float rest = call.bias == nullptr ? scale : 1.f;  // biased scores are scaled
        for (int row = 0; row < num_rows; ++row, products += TILE, weights += TILE / A::PER_TERM) {
            const Visible visible = visible_to(row);
            if (is_whole) {
                compute_weights<A, true>(products, GROUPS, visible, rest, factors[row], softmax[row], weights);
            } else {
                compute_weights<A, false>(products, num_groups, visible, rest, factors[row], softmax[row], weights);
            }
            if constexpr (HAS_SCALES) scale_weights(value_scales, num_groups, visible, weights);
        }
    }
};

}  // namespace
}  // namespace kvasir

using namespace kvasir;

KVASIR_KERNEL void kvasir_attention_float32(const AttentionBatch* batch, const AttentionCall* call) {
    Attention<float>(*batch, *call).run();
}

KVASIR_KERNEL void kvasir_attention_float32_over_float16(const AttentionBatch* batch, const AttentionCall* call) {
    Attention<float, half>(*batch, *call).run();
}

KVASIR_KERNEL void kvasir_attention_float32_over_int8(const AttentionBatch* batch, const AttentionCall* call) {
    Attention<float, int8_t>(*batch, *call).run();
}

KVASIR_KERNEL void kvasir_attention_bfloat16_over_int8(const AttentionBatch* batch, const AttentionCall* call) {
    Attention<bf16, int8_t>(*batch, *call).run();
}

KVASIR_KERNEL void kvasir_attention_bfloat16(const AttentionBatch* batch, const AttentionCall* call) {
    Attention<bf16>(*batch, *call).run();
}

// Returns whether all slots and blocks of a step are within the cache, and no context exceeds its block table. The
// attention kernels do not check this.
KVASIR_KERNEL bool kvasir_is_within_cache(const AttentionBatch* batch) {
    bool is_within = true;
    const auto num_slots = static_cast<uint64_t>(batch->num_blocks * batch->block_size);
    for (int64_t token = 0; token < batch->num_tokens; ++token) {
        is_within &= static_cast<uint64_t>(batch->slots[token]) < num_slots;
    }
    for (int64_t sequence = 0; sequence < batch->num_sequences; ++sequence) {
        is_within &= batch->context_lengths[sequence] <= batch->table_width * batch->block_size;
        for (int64_t block = 0; block < batch->table_width; ++block) {
            is_within &= static_cast<uint64_t>(batch->tables[sequence * batch->table_width + block]) <
                         static_cast<uint64_t>(batch->num_blocks);
        }
    }
    return is_within;
}
