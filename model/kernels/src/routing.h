// Routing of a mixture of experts: the choice of each row's experts, and the rows of each expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel.h"

namespace kvasir {

// Chooses the `count` experts of a row with the highest logits; of equal ones the first. Writes their numbers, and their
// probabilities by a softmax over all experts, or over the chosen ones. Overwrites the logits. Numbers are valid even if
// logits are NaN.
inline void choose_experts(float* logits, int64_t num_experts, int64_t count, bool over_chosen, int32_t* experts,
                           float* weights) {
    const float most = *std::max_element(logits, logits + num_experts);
    float total = 0.f;
    for (int64_t at = 0; at < num_experts && !over_chosen; ++at) total += std::exp(logits[at] - most);
    for (int64_t place = 0; place < count; ++place) {
        float* best = std::max_element(logits, logits + num_experts);
        experts[place] = static_cast<int32_t>(best - logits);
        weights[place] = std::exp(*best - most);
        if (over_chosen) total += weights[place];
        *best = -std::numeric_limits<float>::infinity();
    }
    for (int64_t place = 0; place < count; ++place) weights[place] /= total;
}

// Rows of one expert that one task computes: the pairs from `first` to `end` - 1, at most TASK_ROWS.
struct ExpertPart {
    int64_t expert, first, end;
};

// Pairs of a row and one of its experts, in the order of experts, then of rows. rows, weights: of every pair.
struct Pairs {
    const int32_t* rows;
    const float* weights;
    const ExpertPart* parts;
    int64_t num_parts;
};

// Memory of the mixtures of experts that one thread calls; the next layer overwrites it.
struct MixtureScratch {
    Scratch normed, logits, experts, weights, pair_rows, pair_weights, starts, parts, wide, narrow, scales;
};

// Returns the pairs of all rows. experts, weights: `count` for each row.
inline Pairs pair_up(const int32_t* experts, const float* weights, int64_t rows, int64_t count, int64_t num_experts,
                     MixtureScratch& scratch) {
    const int64_t num_pairs = rows * count;
    auto* pair_rows = reinterpret_cast<int32_t*>(scratch.pair_rows.reserve(num_pairs * sizeof(int32_t)));
    auto* pair_weights = reinterpret_cast<float*>(scratch.pair_weights.reserve(num_pairs * sizeof(float)));
    auto* starts = reinterpret_cast<int64_t*>(scratch.starts.reserve((num_experts + 1) * sizeof(int64_t)));
    const int64_t most_parts = num_experts + num_pairs / TASK_ROWS;
    auto* parts = reinterpret_cast<ExpertPart*>(scratch.parts.reserve(most_parts * sizeof(ExpertPart)));
    std::fill(starts, starts + num_experts + 1, 0);
    for (int64_t pair = 0; pair < num_pairs; ++pair) ++starts[experts[pair] + 1];
    int64_t num_parts = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        starts[expert + 1] += starts[expert];
        for (int64_t first = starts[expert]; first < starts[expert + 1]; first += TASK_ROWS) {
            parts[num_parts++] = {expert, first, std::min(first + TASK_ROWS, starts[expert + 1])};
        }
    }
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const int64_t at = starts[experts[pair]]++;
        pair_rows[at] = static_cast<int32_t>(pair / count);
        pair_weights[at] = weights[pair];
    }
    return {pair_rows, pair_weights, parts, num_parts};
}

}  // namespace kvasir
