#include "host/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace sglang_hybrid {
namespace {

constexpr float lowest = std::numeric_limits<float>::lowest();

// Convert a head's estimates to logarithms of shares of the head's attention. Estimates that are not finite (of a page with
// NaN) must neither win nor poison the others.
void to_shares(float* estimates, uint32_t blocks) {
    float highest = lowest;
    for (uint32_t i = 0; i < blocks; ++i) {
        if (!std::isfinite(estimates[i])) estimates[i] = lowest;
        highest = std::max(highest, estimates[i]);
    }
    float sum = 0;
    for (uint32_t i = 0; i < blocks; ++i) sum += std::exp(estimates[i] - highest);
    const float normalisation = highest + std::log(sum);
    for (uint32_t i = 0; i < blocks; ++i) estimates[i] -= normalisation;
}

}  // namespace

void select_blocks(float* estimates, uint32_t group, uint32_t blocks, const SelectionRules& rules, uint32_t* positions) {
    for (uint32_t g = 0; g < group; ++g) to_shares(estimates + uint64_t{g} * blocks, blocks);
    // blocks that are always selected need no score
    const uint32_t first = std::min(rules.sink, blocks), last = std::max(first, blocks - std::min(blocks, rules.recent + 1));
    thread_local std::vector<float> scores;
    thread_local std::vector<uint32_t> order;
    scores.resize(blocks);
    for (uint32_t i = first; i < last; ++i) {
        float most = lowest;
        for (uint32_t g = 0; g < group; ++g) most = std::max(most, estimates[uint64_t{g} * blocks + i]);
        float sum = 0;
        for (uint32_t g = 0; g < group; ++g) sum += std::exp(estimates[uint64_t{g} * blocks + i] - most);
        scores[i] = most + std::log(sum);
    }
    order.resize(last - first);
    std::iota(order.begin(), order.end(), first);
    const uint32_t wanted = rules.limit - first - (blocks - last);
    std::nth_element(order.begin(), order.begin() + wanted, order.end(),
                     [&](uint32_t a, uint32_t b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); });
    uint32_t* to = positions;
    for (uint32_t i = 0; i < first; ++i) *to++ = i;
    std::sort(order.begin(), order.begin() + wanted);
    to = std::copy_n(order.begin(), wanted, to);
    for (uint32_t i = last; i < blocks; ++i) *to++ = i;
}

}  // namespace sglang_hybrid
