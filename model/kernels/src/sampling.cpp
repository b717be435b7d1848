// Sampling of tokens by temperature, top_k, top_p and min_p, as model/sampling/sampler.py defines it. A row's token is a
// function of its logits and parameters alone: all sums are in an order that depends on the vocabulary only.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernel.h"
#include "lanes.h"

namespace kvasir {

// A row of logits and its sampling parameters. top_k: 0 keeps all tokens. uniform: in [0, 1). id: the sampled token.
struct SampledRow {
    const float* logits;
    double temperature, top_p, min_p, uniform;
    int64_t top_k, id;
};

namespace {

constexpr int64_t BLOCK = 512;          // tokens whose weights are summed together
constexpr int BINS = 2048;              // of tokens by log2 of their weights, for top_k and top_p
constexpr float BINS_PER_OCTAVE = 64.f;

thread_local Scratch scratch;

// Weights of a row's tokens relative to the most likely token, which has weight 1.
class TokenWeights {
public:
    TokenWeights(const SampledRow& row, int64_t size)
        : row(row), size(size), weights(reinterpret_cast<float*>(scratch.reserve(bytes(size)))) {
        Lanes most = splat(-std::numeric_limits<float>::infinity());
        for (int64_t at = 0; at < size; at += LANES) {
            const Lanes some = load_up_to(row.logits + at, size - at);
            const bool is_whole = size - at >= LANES;
            most = max(most, is_whole ? some : select(0, static_cast<int>(size - at), some, most));
        }
        highest = largest(most);
        constexpr double LOG2_E = 1.4426950408889634, LARGEST = std::numeric_limits<float>::max();
        scale = static_cast<float>(std::min(LARGEST, LOG2_E / row.temperature));
    }

    // Returns the sampled token; 0 if a logit is NaN, or the highest is infinite.
    int64_t sample() {
        double total = sum_up(0.f);
        if (!(total > 0.0 && std::isfinite(highest))) return 0;
        const bool has_filter = (row.top_k > 0 && row.top_k < size) || row.top_p < 1.0;
        const float floor = std::max(static_cast<float>(row.min_p), has_filter ? least_kept() : 0.f);
        if (floor > 0.f) total = sum_kept(floor);
        return find(row.uniform * total, floor);
    }

private:
    const SampledRow& row;
    const int64_t size;
    float* const weights;
    float highest, scale;
    std::vector<double> ends;  // sum of the weights up to the end of each block

    static int64_t num_blocks(int64_t size) { return (size + BLOCK - 1) / BLOCK; }
    static size_t bytes(int64_t size) { return static_cast<size_t>(num_blocks(size) * BLOCK) * sizeof(float); }

    // Computes the weights, and returns their sum. exp2 clamps at 2^-126, which becomes 0 here.
    double sum_up(float floor) {
        const Lanes shift = splat(highest), factor = splat(scale), least = splat(0x1p-126f);
        for (int64_t at = 0; at < num_blocks(size) * BLOCK; at += LANES) {
            const int64_t left = size - at;
            Lanes some = zeros();
            if (left > 0) some = sub(exp2(mul(sub(load_up_to(row.logits + at, left), shift), factor)), least);
            store(weights + at, left >= LANES ? some : select(0, static_cast<int>(std::max<int64_t>(left, 0)), some, zeros()));
        }
        return sum_kept(floor);
    }

    // Returns the sum of the weights that reach the floor, and sets `ends`.
    double sum_kept(float floor) {
        double total = 0.0;
        ends.clear();
        for (int64_t start = 0; start < size; start += BLOCK) {
            double sums[LANES] = {};
            for (int64_t at = start; at < start + BLOCK; at += LANES) {
                for (int lane = 0; lane < LANES; ++lane) {
                    const float weight = weights[at + lane];
                    sums[lane] += weight >= floor ? weight : 0.f;
                }
            }
            for (double part : sums) total += part;
            ends.push_back(total);
        }
        return total;
    }

    // Returns the first token at which the sum of the kept weights exceeds `wanted`.
    int64_t find(double wanted, float floor) const {
        const auto block = std::upper_bound(ends.begin(), ends.end(), wanted) - ends.begin();
        if (block == static_cast<int64_t>(ends.size())) return last_kept(size, floor);
        double sum = block == 0 ? 0.0 : ends[block - 1];
        const int64_t end = std::min(size, (block + 1) * BLOCK);
        for (int64_t token = block * BLOCK; token < end; ++token) {
            if (weights[token] >= floor) sum += weights[token];
            if (sum > wanted && weights[token] > 0.f && weights[token] >= floor) return token;
        }
        return last_kept(end, floor);  // the block's sum exceeded that of its tokens one by one, by rounding
    }

    int64_t last_kept(int64_t end, float floor) const {
        while (end > 1 && !(weights[end - 1] >= floor && weights[end - 1] > 0.f)) --end;
        return end - 1;
    }

    // Returns the smallest weight that top_k and top_p keep. Bins make it a partial sort: only the members of the bin
    // in which top_k ends, and of that in which top_p ends, are sorted.
    float least_kept() const {
        const float factor = scale * BINS_PER_OCTAVE;
        std::vector<uint16_t> bins(static_cast<size_t>(size));
        for (int64_t token = 0; token < size; ++token) {
            bins[token] = static_cast<uint16_t>(std::min(BINS - 1.f, (highest - row.logits[token]) * factor));
        }
        int64_t counts[BINS] = {};
        double sums[BINS] = {};
        for (int64_t token = 0; token < size; ++token) {
            ++counts[bins[token]];
            sums[bins[token]] += weights[token];
        }
        const auto descending_from = [&](int bin, float floor) {
            std::vector<float> members;
            for (int64_t token = 0; token < size; ++token) {
                if (bins[token] == bin && weights[token] >= floor) members.push_back(weights[token]);
            }
            std::sort(members.begin(), members.end(), std::greater<float>());
            return members;
        };
        float floor = 0.f;
        int last = BINS - 1;  // bin of the least likely token that is kept
        if (row.top_k > 0 && row.top_k < size) {
            int64_t left = row.top_k;
            for (last = 0; counts[last] < left; ++last) left -= counts[last];
            floor = descending_from(last, 0.f)[left - 1];
        }
        if (row.top_p >= 1.0) return floor;
        const std::vector<float> members = descending_from(last, floor);
        sums[last] = 0.0;
        for (float weight : members) sums[last] += weight;
        double wanted = 0.0, before = 0.0;
        for (int bin = 0; bin <= last; ++bin) wanted += sums[bin];
        wanted *= row.top_p;
        int bin = 0;
        while (bin < last && before + sums[bin] < wanted) before += sums[bin++];
        for (float weight : bin == last ? members : descending_from(bin, floor)) {
            if (before >= wanted) break;
            before += weight;
            floor = weight;
        }
        return floor;
    }
};

}  // namespace

// Samples the token of each row of `size` logits.
KVASIR_KERNEL void kvasir_sample(SampledRow* rows, int64_t count, int64_t size, int64_t threads) {
    parallel_for(count, threads, [&](int64_t index, int) { rows[index].id = TokenWeights(rows[index], size).sample(); });
}

}  // namespace kvasir
