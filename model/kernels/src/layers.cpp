// Transformer layers: one call computes everything between the attentions of two consecutive layers, all layers with
// their attention, or a whole decode step.
#include <algorithm>

#include "low_rank.h"
#include "quantized.h"
#include "routing.h"

namespace kvasir {
namespace {

// Weights of one layer; null if the layer has no such weights. Norm weights include their offset. The out norms are of
// the outputs of attention and MLP; a layer has both or neither. kv_heads: 0 if the layer reads the keys and values of an
// earlier layer. rotated: dimensions of a head with rotary embedding. query_angle, key_angle: index of the first of these
// heads' angles among those of a position in `Rows`; -1: they are not rotated. input_gate, input_out and input_norm are of
// the layer's input; see LayerInputWeights. A layer with experts has a router (float32), and a matrix of each expert in
// place of up and down. factor: of the layer's output.
struct LayerWeights {
    Matrix qkv, out, up, down, input_gate, input_out;
    const float *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias;
    const float *attention_out_norm, *attention_out_norm_bias, *mlp_out_norm, *mlp_out_norm_bias;
    const float *query_norm, *key_norm, *value_norm, *input_norm;
    int64_t kv_heads, head_dim, mlp, rotated, query_angle, key_angle;
    const Matrix *router, *expert_ups, *expert_downs;
    float factor;
};

// Inputs of all layers: for each token and layer `size` numbers, the sum of a row of a second embedding, multiplied by
// table_factor, and of the normed product of the token's embedding and the projection, multiplied by x_factor.
struct LayerInputWeights {
    Matrix projection;
    const void* table;
    const float* norm;
    int64_t size;
    float x_factor, table_factor;
};

// Parameters that all layers share. numbers: type of queries, keys and values (float32 or bfloat16). num_angles: angles
// of a position, of all rotary embeddings. norm_scope, of query and key norms: 0 for each head, 1 for all heads.
// norms_rotated: they come after the rotation. experts_per_row, normalizes_experts: `num_per_token` and `normalizes` of
// `Experts`. logit_soft_cap: bound of the logits; 0: no bound.
struct Shape {
    int64_t hidden, heads;
    int64_t num_angles, norm_scope, norms_rotated;
    Numbers numbers;
    Norm norm;
    Activation activation;
    int64_t gated, is_parallel, num_experts, experts_per_row, normalizes_experts;
    float eps, logit_soft_cap;
};

// Rows of one step, in buffers that Python owns. Row strides are sizes rounded up by `padded`.
struct Rows {
    int64_t count, threads;
    float* x;         // the residual stream, count rows of padded(hidden)
    float* added;     // as x: output of attention or MLP, if it is normed before the sum or both read the same x
    void* qkv;        // queries, keys and values, rows of qkv.outputs
    void* wide;       // inputs of a matrix, then the hidden values of the MLP
    void* narrow;     // inputs of a quantized matrix: Int8Input, or `Input` of a matrix in strips
    float* scales;    // scale of each row of an int8 input
    float* layer_inputs;           // inputs of all layers, rows of projection.outputs
    const float *cosines, *sines;  // for every position, num_angles numbers
    const int64_t* positions;      // position of every row
    const void* embedding;         // `hidden` numbers for every token id, or null
    const int64_t* tokens;         // token id of every row; must be below the vocabulary size
    const Matrix* packed;          // packed embedding, or null; x is given if both are null
    const LayerAdapter* const* adapters;  // the layers of every row's adapter, or null; null: no row has an adapter
    // Piece i has the rows from pieces[i] to pieces[i + 1] - 1, which have the same adapter, or none.
    const int64_t* pieces;
    int64_t num_pieces;
    void* low;  // results of an adapter's `down`, in the type of its inputs, low_stride numbers a row
    int64_t low_stride;
    float* additions;  // of the adapters to the results of a matrix, outputs numbers a row
};

// Matrix of a layer. Selects the adapters' additions to it.
struct Adapted {
    int64_t layer;
    LowRank LayerAdapter::*matrix;
};

// Arguments of a step of a whole model. Python updates the buffers in place from step to step.
struct StepArguments {
    const Shape* shape;
    const Rows* rows;
    const LayerWeights* layers;
    const LayerInputWeights* layer_inputs;  // null: the layers have no inputs of their own
    // num_positions: positions with cosines and sines. vocabulary: tokens with an embedding.
    int64_t num_layers, num_positions, vocabulary;
    AttentionKernel attend;
    const AttentionBatch* batch;
    const AttentionCall* calls;  // one for each layer
    const void* mixed;           // output of attention: rows of heads * head_dim of the layer
    const Matrix* head;
    const float *norm, *norm_bias;
    float* logits;  // head->outputs a row
    int64_t* ids;   // index of each row's highest logit among the first num_ids; -1 if a row is not finite
    int64_t num_ids;
};

template <typename Number>
class Step {
   public:
    Step(const Shape& shape, const Rows& rows) : shape(shape), rows(rows), stride(padded(shape.hidden)) {}

    // Sets x to the tokens' embeddings, unless x is given.
    void embed() const {
        if (rows.packed != nullptr) {
            return each_row([&](int64_t row) { unpack_row(*rows.packed, rows.tokens[row], rows.x + row * stride); });
        }
        const auto* table = static_cast<const Number*>(rows.embedding);
        for (int64_t row = 0; table != nullptr && row < rows.count; ++row) {
            convert(table + rows.tokens[row] * shape.hidden, shape.hidden, rows.x + row * stride);
        }
    }

    // Computes the inputs of all layers from x, the tokens' embeddings.
    void embed_layers(const LayerInputWeights& inputs, int64_t num_layers) const {
        const Matrix& matrix = inputs.projection;
        product(matrix, norm_inputs(matrix, nullptr, nullptr),
                [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
                    float* at = rows.layer_inputs + row * matrix.outputs + output;
                    for (int b = 0; b < blocks; ++b) store(at + b * LANES, mul(results[b], splat(inputs.x_factor)));
                });
        const auto* table = static_cast<const Number*>(inputs.table);
        each_row([&](int64_t row) {
            static thread_local float found[MAX_WIDTH];
            float* to = rows.layer_inputs + row * matrix.outputs;
            const Number* from = table + rows.tokens[row] * num_layers * inputs.size;
            for (int64_t layer = 0; layer < num_layers; ++layer, to += inputs.size, from += inputs.size) {
                normalize(shape.norm, to, inputs.size, inputs.norm, nullptr, shape.eps, to);
                convert(from, inputs.size, found);
                for (int64_t at = 0; at < inputs.size; ++at) to[at] += found[at] * inputs.table_factor;
            }
        });
    }

    // Computes x += norm(out(f(gate(x)) * input)), if the layers have inputs, then x *= factor.
    void finish_input(const LayerWeights& layer, int64_t number, const LayerInputWeights* inputs) const {
        if (inputs != nullptr) {
            const int64_t size = inputs->size, hidden_stride = padded(size);
            Wide* hidden = wide() + rows.count * stride;
            product(layer.input_gate, norm_inputs(layer.input_gate, nullptr, nullptr),
                    [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
                        const float* by = rows.layer_inputs + row * inputs->projection.outputs + number * size + output;
                        Wide* at = hidden + row * hidden_stride + output;
                        for (int b = 0; b < blocks; ++b, at += LANES, by += LANES) {
                            store(at, mul(activate(shape.activation, results[b]), load(by)));
                        }
                    });
            add_product(layer.input_out, convert_inputs(layer.input_out, hidden, size, hidden_stride), rows.added, false);
            add_normed(layer.input_norm, nullptr);
        }
        if (layer.factor == 1.f) return;
        each_row([&](int64_t row) {
            float* x = rows.x + row * stride;
            for (int64_t at = 0; at < stride; at += LANES) store(x + at, mul(load(x + at), splat(layer.factor)));
        });
    }

    // Computes x += out(mixed), x += mlp(norm(x)), or another arrangement of `model.nn.transformer.Block`.
    void finish(const LayerWeights& layer, int64_t number, const void* mixed) const {
        const int64_t width = shape.heads * layer.head_dim;
        const bool norms_outputs = layer.attention_out_norm != nullptr;
        const bool adds = !norms_outputs && !shape.is_parallel;
        const Adapted adapted{number, &LayerAdapter::out};
        add_product(layer.out, convert_inputs(layer.out, static_cast<const Number*>(mixed), width, width, adapted),
                    adds ? rows.x : rows.added, adds, adapted);
        if (norms_outputs) add_normed(layer.attention_out_norm, layer.attention_out_norm_bias);
        if (layer.router == nullptr) {
            mlp(layer, number, adds ? rows.x : rows.added, !norms_outputs);
        } else {
            mixture(layer);
        }
        if (norms_outputs) {
            add_normed(layer.mlp_out_norm, layer.mlp_out_norm_bias);
        } else {
            if (shape.is_parallel) each_row([&](int64_t row) { add_row(row); });
        }
    }

    // Computes queries, keys and values from the norm of x, then their norms and rotary embedding.
    void begin(const LayerWeights& layer, int64_t number) const {
        const Matrix& matrix = layer.qkv;
        const Adapted adapted{number, &LayerAdapter::qkv};
        auto* qkv = static_cast<Number*>(rows.qkv);
        store_product(matrix, norm_inputs(matrix, layer.attention_norm, layer.attention_norm_bias, adapted), qkv, adapted);
        const int64_t query = shape.heads * layer.head_dim, key = layer.kv_heads * layer.head_dim;
        if (layer.query_norm == nullptr && layer.value_norm == nullptr && layer.query_angle < 0) return;
        each_row([&](int64_t row) {
            Number* heads = qkv + row * matrix.outputs;
            norm_and_rotate(layer, heads, query, layer.query_norm, row, layer.query_angle);
            norm_and_rotate(layer, heads + query, key, layer.key_norm, row, layer.key_angle);
            if (layer.value_norm != nullptr) {
                norm_and_rotate(layer, heads + query + key, key, layer.value_norm, row, -1);
            }
        });
    }

    // Computes the logits of the rows of x: float32, head.outputs a row.
    void logits(const Matrix& head, const float* norm, const float* bias, float* out) const {
        const float cap = shape.logit_soft_cap;
        if (cap == 0.f) return store_product(head, norm_inputs(head, norm, bias), out);
        product(head, norm_inputs(head, norm, bias), [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
            float* at = out + row * head.outputs + output;
            for (int b = 0; b < blocks; ++b) store(at + b * LANES, soft_cap(results[b], 1.f / cap, cap));
        });
    }

    // Sets ids to the index of each row's highest logit among the first `size`; -1 if a logit, or a number of x, is NaN
    // or infinite.
    void most_likely(const float* logits, int64_t row_stride, int64_t size, int64_t* ids) const {
        each_row([&](int64_t row) {
            const bool is_known = is_finite(rows.x + row * stride, shape.hidden);
            ids[row] = is_known ? kvasir::most_likely(logits + row * row_stride, size) : -1;
        });
    }

   private:
    // Rows in the input type of a matrix. stride: distance between rows, in numbers.
    struct Inputs {
        const void* x;
        int64_t stride;
    };
    // Input type of products with float32 and bfloat16 matrices.
    using Wide = std::conditional_t<std::is_same_v<Number, bf16>, Bfloat16Input, float>;
    static constexpr int64_t MAX_WIDTH = 65536;  // numbers of a row in a thread's scratch memory
    static constexpr int64_t UP_BLOCKS = 16;     // blocks of an adapter's outputs that one task computes
    const Shape& shape;
    const Rows& rows;
    const int64_t stride;

    Wide* wide() const { return static_cast<Wide*>(rows.wide); }

    template <typename Work>
    void each_row(const Work& work) const {
        parallel_for(rows.count, rows.count < 4 ? 1 : rows.threads, [&](int64_t row, int) { work(row); });
    }

    static bool is_quantized(const Matrix& matrix) { return matrix.numbers >= Numbers::int8; }

    template <typename From>
    void convert_row(const Matrix& matrix, const From* from, int64_t size, int64_t row, int64_t to_stride) const {
        if (matrix.numbers == Numbers::int8) {
            rows.scales[row] = quantize(from, size, static_cast<Int8Input*>(rows.narrow) + row * to_stride);
        } else if (is_quantized(matrix)) {
            static thread_local int8_t codes[MAX_WIDTH];
            rows.scales[row] = quantize(from, size, codes);
            std::fill(codes + size, codes + padded(size), int8_t(0));
            with_strips(matrix.numbers, [&](auto kind) {
                using Kind = decltype(kind);
                auto* to = static_cast<typename Kind::Input*>(rows.narrow) + row * to_stride / Kind::INPUTS;
                split(codes, padded(size), to);
            });
        } else {
            convert(from, size, wide() + row * to_stride);
        }
    }

    bool has_addition(const Adapted& adapted, int64_t row) const {
        const LayerAdapter* layers = rows.adapters[row];
        return layers != nullptr && (layers[adapted.layer].*adapted.matrix).rank > 0;
    }

    bool has_adapters(const Adapted& adapted) const { return rows.adapters != nullptr && adapted.matrix != nullptr; }

    // Calls work(kind, count, first) for `count` rows, from `first` on, of a piece that has an adapter, then for the next.
    template <typename Work>
    void each_tile(const Matrix& matrix, int64_t piece, const Work& work) const {
        const int64_t start = rows.pieces[piece], end = rows.pieces[piece + 1];
        for (int64_t first = start; rows.adapters[start] != nullptr && first < end; first += ADAPTED_ROWS) {
            with_rows<ADAPTED_ROWS>(static_cast<int>(end - first), [&](auto count) {
                matrix.numbers == Numbers::float32 ? work(Float32{}, count, first) : work(Bfloat16{}, count, first);
            });
        }
    }

    // Calls work(row, to) for every row. It writes the row's `size` inputs of the matrix, to `inputs` unless the matrix is
    // quantized, and, unless `to` is null, the adapters' inputs to `to`. Then computes the adapters' additions.
    template <typename Work>
    void each_input_row(const Matrix& matrix, Adapted adapted, int64_t size, Inputs inputs, const Work& work) const {
        using To = Bfloat16Input*;
        if (!has_adapters(adapted)) return each_row([&](int64_t row) { work(row, To(nullptr)); });
        parallel_for(rows.num_pieces, rows.threads, [&](int64_t piece, int) {
            static thread_local Scratch scratch;
            const int64_t start = rows.pieces[piece], end = rows.pieces[piece + 1];
            To to = nullptr;
            if (is_quantized(matrix)) to = reinterpret_cast<To>(scratch.reserve((end - start) * size * sizeof *to));
            for (int64_t row = start; row < end; ++row) work(row, to == nullptr ? to : to + (row - start) * size);
            each_tile(matrix, piece, [&](auto kind, auto count, int64_t first) {
                using Kind = decltype(kind);
                using Input = typename Kind::Input;
                const int64_t stride = to == nullptr ? inputs.stride : size, groups = (size + Kind::GROUP - 1) / Kind::GROUP;
                const Input* x = to == nullptr ? static_cast<const Input*>(inputs.x) + first * stride
                                               : reinterpret_cast<const Input*>(to) + (first - start) * stride;
                const LowRank& low = rows.adapters[first][adapted.layer].*adapted.matrix;
                multiply_down<Kind, decltype(count)::value>(low, x, stride, groups, low_row<Kind>(first), rows.low_stride);
            });
        });
        const int64_t blocks = matrix.outputs / LANES, parts = (blocks + UP_BLOCKS - 1) / UP_BLOCKS;
        parallel_for(rows.num_pieces * parts, rows.threads, [&](int64_t task, int) {
            const int64_t block = task % parts * UP_BLOCKS;
            each_tile(matrix, task / parts, [&](auto kind, auto count, int64_t first) {
                using Kind = decltype(kind);
                const LowRank& low = rows.adapters[first][adapted.layer].*adapted.matrix;
                if (low.rank == 0) return;
                multiply_up<Kind, decltype(count)::value>(
                    low.up + block, std::min(UP_BLOCKS, blocks - block), low_row<Kind>(first), rows.low_stride,
                    rows.additions + first * matrix.outputs + block * LANES, matrix.outputs);
            });
        });
    }

    template <typename Kind>
    typename Kind::Input* low_row(int64_t row) const {
        return static_cast<typename Kind::Input*>(rows.low) + row * rows.low_stride;
    }

    // Converts the norm of x, or x if norm is null, to the input type of the matrix.
    Inputs norm_inputs(const Matrix& matrix, const float* norm, const float* bias, Adapted adapted = {}) const {
        each_input_row(matrix, adapted, shape.hidden, {rows.wide, stride}, [&](int64_t row, Bfloat16Input* to) {
            static thread_local float normed[MAX_WIDTH];
            const float* from = rows.x + row * stride;
            if (norm != nullptr) {
                normalize(shape.norm, from, shape.hidden, norm, bias, shape.eps, normed);
                from = normed;
            }
            if (to != nullptr) convert(from, shape.hidden, to);
            convert_row(matrix, from, shape.hidden, row, stride);
        });
        return {is_quantized(matrix) ? rows.narrow : rows.wide, stride};
    }

    // Converts rows to the input type of the matrix; returns x itself if the type is the same.
    template <typename From>
    Inputs convert_inputs(const Matrix& matrix, const From* x, int64_t size, int64_t x_stride, Adapted adapted = {}) const {
        const bool is_same = !is_quantized(matrix) && std::is_same_v<From, Wide>;
        if (is_same && !has_adapters(adapted)) return {x, x_stride};
        const Inputs inputs = is_same ? Inputs{x, x_stride} : Inputs{rows.wide, padded(size)};
        each_input_row(matrix, adapted, size, inputs, [&](int64_t row, Bfloat16Input* to) {
            if (to != nullptr) convert(x + row * x_stride, size, to);
            if (!is_same) convert_row(matrix, x + row * x_stride, size, row, padded(size));
        });
        return is_quantized(matrix) ? Inputs{rows.narrow, padded(size)} : inputs;
    }

    // Calls work(row, output, results, blocks) with the results of a product and the adapters' additions; see Emit.
    template <typename Work>
    void product(const Matrix& matrix, Inputs inputs, const Work& work, Adapted adapted = {}) const {
        if (!has_adapters(adapted)) return multiply_all(matrix, inputs, work);
        multiply_all(matrix, inputs, [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
            if (!has_addition(adapted, row)) return work(row, output, results, blocks);
            Lanes sums[PANEL / LANES];
            const float* additions = rows.additions + row * matrix.outputs + output;
            for (int b = 0; b < blocks; ++b) sums[b] = add(results[b], load(additions + b * LANES));
            work(row, output, sums, blocks);
        });
    }

    template <typename Work>
    void multiply_all(const Matrix& matrix, Inputs inputs, const Work& work) const {
        const Emit emit = [](const void* work, int64_t row, int64_t output, const Lanes* results, int blocks) {
            (*static_cast<const Work*>(work))(row, output, results, blocks);
        };
        multiply(matrix, inputs.x, inputs.stride, rows.scales, rows.count, rows.threads, emit, &work);
    }

    // Prefetches the lines to which a product will write the same results of a row of its next tile; `at`: where it writes
    // them for this row. Always inlined: GCC removes calls of functions that only prefetch.
    template <typename To>
    __attribute__((always_inline)) inline void prefetch_next(int64_t row, const To* at, int64_t row_stride,
                                                             int blocks) const {
        if (row + TILE_ROWS >= rows.count) return;
        const auto* next = reinterpret_cast<const char*>(at + TILE_ROWS * row_stride);
        for (size_t byte = 0; byte < blocks * LANES * sizeof(To); byte += 64) __builtin_prefetch(next + byte, 1);
    }

    // Computes a product, and writes or adds it to rows of floats.
    void add_product(const Matrix& matrix, Inputs inputs, float* to, bool adds, Adapted adapted = {}) const {
        const auto work = [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
            float* at = to + row * stride + output;
            prefetch_next(row, at, stride, blocks);
            for (int b = 0; b < blocks; ++b, at += LANES) {
                store(at, adds ? add(load(at), results[b]) : results[b]);
            }
        };
        product(matrix, inputs, work, adapted);
    }

    // Computes a product, and writes it to rows of matrix.outputs numbers.
    template <typename To>
    void store_product(const Matrix& matrix, Inputs inputs, To* to, Adapted adapted = {}) const {
        const auto work = [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
            To* at = to + row * matrix.outputs + output;
            prefetch_next(row, at, matrix.outputs, blocks);
            for (int b = 0; b < blocks; ++b) store(at + b * LANES, results[b]);
        };
        product(matrix, inputs, work, adapted);
    }

    // Writes the activations of a row's results: `hidden` is the row's hidden values.
    void activate_results(Wide* hidden, int64_t output, const Lanes* results, int blocks) const {
        Wide* at = hidden + (shape.gated ? output / 2 : output);
        if (shape.gated) {  // blocks of gates alternate with the blocks that they multiply
            for (int b = 0; b < blocks; b += 2, at += LANES) {
                store(at, mul(activate(shape.activation, results[b]), results[b + 1]));
            }
        } else {
            for (int b = 0; b < blocks; ++b, at += LANES) store(at, activate(shape.activation, results[b]));
        }
    }

    // Computes the MLP of the norm of x, or of x if the layer has no such norm, and writes or adds it to rows of floats.
    void mlp(const LayerWeights& layer, int64_t number, float* to, bool adds) const {
        const Adapted up{number, &LayerAdapter::up}, down{number, &LayerAdapter::down};
        const Inputs inputs = norm_inputs(layer.up, layer.mlp_norm, layer.mlp_norm_bias, up);
        // Hidden values go after the inputs, which the product still reads.
        Wide* hidden = wide() + rows.count * stride;
        const int64_t hidden_stride = padded(layer.mlp);
        const auto work = [&](int64_t row, int64_t output, const Lanes* results, int blocks) {
            const int64_t first = shape.gated ? output / 2 : output;
            prefetch_next(row, hidden + row * hidden_stride + first, hidden_stride, shape.gated ? blocks / 2 : blocks);
            activate_results(hidden + row * hidden_stride, output, results, blocks);
        };
        product(layer.up, inputs, work, up);
        add_product(layer.down, convert_inputs(layer.down, hidden, layer.mlp, hidden_stride, down), to, adds, down);
    }

    // Calls work(row, output, results, blocks) with the results of a piece of a product, whose inputs are in rows.narrow
    // or `wide`.
    template <typename Work>
    void product_piece(const Matrix& matrix, const Wide* wide, int64_t stride, Piece piece, const Work& work) const {
        const Emit emit = [](const void* work, int64_t row, int64_t output, const Lanes* results, int blocks) {
            (*static_cast<const Work*>(work))(row, output, results, blocks);
        };
        const void* inputs = is_quantized(matrix) ? rows.narrow : wide;
        multiply_piece(matrix, inputs, stride, rows.scales, piece, emit, &work);
    }

    // Returns the number of outputs of a task of a mixture, which reads each expert's panels in sequence: up to eight
    // panels, if that leaves four tasks or more to each thread.
    static int64_t run_of(int64_t outputs, int64_t threads) {
        return std::max<int64_t>(1, std::min<int64_t>(8, outputs / PANEL / threads / 4)) * PANEL;
    }

    // Adds the weighted sum of the outputs of each row's experts to x. The sum is in the order of the experts' numbers,
    // and so is batch-invariant.
    void mixture(const LayerWeights& layer) const {
        static thread_local MixtureScratch scratch;
        const Pairs pairs = route(layer, scratch);
        const int64_t num_pairs = rows.count * shape.experts_per_row, threads = rows.threads;
        const int64_t size = layer.expert_downs->inputs, hidden_stride = padded(size);
        // A step whose rows are the pairs: first with the inputs of the experts, then with their hidden values.
        Rows of_pairs = rows;
        of_pairs.count = num_pairs;
        of_pairs.wide = scratch.wide.reserve(num_pairs * (stride + hidden_stride) * sizeof(Wide));
        of_pairs.narrow = scratch.narrow.reserve(num_pairs * std::max(stride, hidden_stride) / GROUP_SIZE *
                                                 LARGEST_INPUT_BYTES);
        of_pairs.scales = reinterpret_cast<float*>(scratch.scales.reserve(num_pairs * sizeof(float)));
        const Step each(shape, of_pairs);
        Wide *inputs = each.wide(), *hidden = inputs + num_pairs * stride;
        const auto* from = reinterpret_cast<const float*>(scratch.normed.memory);
        each.each_part(pairs, [&](const ExpertPart& part, int64_t pair) {
            const float* row = from + pairs.rows[pair] * stride;
            each.convert_row(layer.expert_ups[part.expert], row, shape.hidden, pair, stride);
        });
        const int64_t ups = layer.expert_ups->outputs, run = run_of(pairs.num_parts * ups, threads);
        const int64_t runs = (ups + run - 1) / run;
        parallel_for(pairs.num_parts * runs, threads, [&](int64_t task, int) {
            const ExpertPart& part = pairs.parts[task / runs];
            const int64_t output = task % runs * run;
            const Piece piece{output, std::min(run, ups - output), part.first, part.end};
            each.product_piece(layer.expert_ups[part.expert], inputs, stride, piece,
                               [&](int64_t pair, int64_t output, const Lanes* results, int blocks) {
                                   activate_results(hidden + pair * hidden_stride, output, results, blocks);
                               });
        });
        each.each_part(pairs, [&](const ExpertPart& part, int64_t pair) {
            const Matrix& down = layer.expert_downs[part.expert];
            if (is_quantized(down)) each.convert_row(down, hidden + pair * hidden_stride, size, pair, hidden_stride);
        });
        // One task sums all experts of some panels.
        const int64_t downs = layer.expert_downs->outputs, down_run = run_of(downs, threads);
        parallel_for((downs + down_run - 1) / down_run, threads, [&](int64_t task, int) {
            const int64_t output = task * down_run;
            for (const ExpertPart* part = pairs.parts; part < pairs.parts + pairs.num_parts; ++part) {
                const Piece piece{output, std::min(down_run, downs - output), part->first, part->end};
                each.product_piece(layer.expert_downs[part->expert], hidden, hidden_stride, piece,
                                   [&](int64_t pair, int64_t output, const Lanes* results, int blocks) {
                                       float* at = rows.x + pairs.rows[pair] * stride + output;
                                       const Lanes weight = splat(pairs.weights[pair]);
                                       for (int b = 0; b < blocks; ++b, at += LANES) {
                                           store(at, fma(weight, results[b], load(at)));
                                       }
                                   });
            }
        });
    }

    // Writes the norm of x to scratch.normed, and returns the pairs of each row and its experts.
    Pairs route(const LayerWeights& layer, MixtureScratch& scratch) const {
        const Matrix& router = *layer.router;
        const int64_t num = shape.num_experts, each = shape.experts_per_row;
        auto* normed = reinterpret_cast<float*>(scratch.normed.reserve(rows.count * stride * sizeof(float)));
        auto* logits = reinterpret_cast<float*>(scratch.logits.reserve(rows.count * router.outputs * sizeof(float)));
        auto* experts = reinterpret_cast<int32_t*>(scratch.experts.reserve(rows.count * each * sizeof(int32_t)));
        auto* weights = reinterpret_cast<float*>(scratch.weights.reserve(rows.count * each * sizeof(float)));
        each_row([&](int64_t row) {
            normalize(shape.norm, rows.x + row * stride, shape.hidden, layer.mlp_norm, layer.mlp_norm_bias, shape.eps,
                      normed + row * stride);
        });
        store_product(router, Inputs{normed, stride}, logits);
        each_row([&](int64_t row) {
            choose_experts(logits + row * router.outputs, num, each, shape.normalizes_experts != 0,
                           experts + row * each, weights + row * each);
        });
        return pair_up(experts, weights, rows.count, each, num, scratch);
    }

    // Calls work(part, pair) for every pair.
    template <typename Work>
    void each_part(const Pairs& pairs, const Work& work) const {
        parallel_for(pairs.num_parts, rows.count < 4 ? 1 : rows.threads, [&](int64_t index, int) {
            const ExpertPart& part = pairs.parts[index];
            for (int64_t pair = part.first; pair < part.end; ++pair) work(part, pair);
        });
    }

    void add_row(int64_t row) const {
        float *to = rows.x + row * stride, *from = rows.added + row * stride;
        for (int64_t at = 0; at < stride; at += LANES) store(to + at, add(load(to + at), load(from + at)));
    }

    void add_normed(const float* norm, const float* bias) const {
        each_row([&](int64_t row) {
            float* added = rows.added + row * stride;
            normalize(shape.norm, added, shape.hidden, norm, bias, shape.eps, added);
            add_row(row);
        });
    }

    // Applies norm and rotary embedding to the heads of one row: queries, keys or values. angle: see LayerWeights.
    void norm_and_rotate(const LayerWeights& layer, Number* heads, int64_t size, const float* norm, int64_t row,
                         int64_t angle) const {
        static thread_local float values[MAX_WIDTH];
        const int64_t step = shape.norm_scope == 0 ? layer.head_dim : size;
        const auto normalize_heads = [&] {
            for (int64_t at = 0; norm != nullptr && at < size; at += step) {
                normalize(Norm::rms, values + at, step, norm, nullptr, shape.eps, values + at);
            }
        };
        convert(heads, size, values);
        if (!shape.norms_rotated) normalize_heads();
        const int64_t angles = rows.positions[row] * shape.num_angles + angle;
        for (int64_t at = 0; angle >= 0 && at < size; at += layer.head_dim) {
            rotate(values + at, layer.rotated / 2, rows.cosines + angles, rows.sines + angles);
        }
        if (shape.norms_rotated) normalize_heads();
        convert(values, size, heads);
    }
};

// Calls work with a Step of the model's number type.
template <typename Work>
void with_step(const StepArguments& arguments, const Work& work) {
    if (arguments.shape->numbers == Numbers::float32) {
        work(Step<float>(*arguments.shape, *arguments.rows));
    } else {
        work(Step<bf16>(*arguments.shape, *arguments.rows));
    }
}

}  // namespace
}  // namespace kvasir

using namespace kvasir;

// Finishes layer `layer` - 1 from its attention output, then computes queries, keys and values of layer `layer`, if the
// model has these layers. Layer 0 starts with the embeddings, if rows has any.
KVASIR_KERNEL void kvasir_between_attentions(const StepArguments* arguments, int64_t layer) {
    with_step(*arguments, [&](const auto& step) {
        if (layer == 0) {
            step.embed();
            if (arguments->layer_inputs != nullptr) step.embed_layers(*arguments->layer_inputs, arguments->num_layers);
        } else {
            const LayerWeights& last = arguments->layers[layer - 1];
            step.finish(last, layer - 1, arguments->mixed);
            step.finish_input(last, layer - 1, arguments->layer_inputs);
        }
        if (layer < arguments->num_layers) step.begin(arguments->layers[layer], layer);
    });
}

// Computes all layers. `attend` reads a layer's queries, keys and values from rows.qkv and writes to `mixed`.
KVASIR_KERNEL void kvasir_layers(const StepArguments* arguments) {
    const Busy busy;
    for (int64_t layer = 0; layer <= arguments->num_layers; ++layer) {
        kvasir_between_attentions(arguments, layer);
        if (layer < arguments->num_layers) arguments->attend(arguments->batch, arguments->calls + layer);
    }
}

// Computes the logits of rows.x: float32, head.outputs a row.
KVASIR_KERNEL void kvasir_logits(const StepArguments* arguments) {
    with_step(*arguments, [&](const auto& step) {
        step.logits(*arguments->head, arguments->norm, arguments->norm_bias, arguments->logits);
    });
}

// Returns whether all numbers are from 0 to limit - 1: token ids in the vocabulary, or positions in a table.
KVASIR_KERNEL bool kvasir_are_tokens(const int64_t* numbers, int64_t count, int64_t limit) {
    return std::all_of(numbers, numbers + count, [&](int64_t number) { return number >= 0 && number < limit; });
}

KVASIR_KERNEL bool kvasir_is_within_cache(const AttentionBatch* batch);

// Computes a decode step, in which every sequence computes one token: all layers, the logits, and the index of each
// row's highest logit. Returns false, without computing anything, if a token, a position, a slot or a block is out of
// range, or a context exceeds its block table.
KVASIR_KERNEL bool kvasir_decode(const StepArguments* arguments) {
    const Rows& rows = *arguments->rows;
    const bool are_tokens = kvasir_are_tokens(rows.tokens, rows.count, arguments->vocabulary);
    const bool are_positions = kvasir_are_tokens(rows.positions, rows.count, arguments->num_positions);
    if (!are_tokens || !are_positions || !kvasir_is_within_cache(arguments->batch)) return false;
    const Busy busy;
    kvasir_layers(arguments);
    kvasir_logits(arguments);
    Step<float>(*arguments->shape, rows)
        .most_likely(arguments->logits, arguments->head->outputs, arguments->num_ids, arguments->ids);
    return true;
}

// See most_likely in rows.h.
KVASIR_KERNEL int64_t kvasir_most_likely(const float* logits, int64_t size) { return most_likely(logits, size); }
