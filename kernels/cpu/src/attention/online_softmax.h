// Softmax over one block after another. Weights are relative to the highest logit so far; when a block raises the highest
// logit, sums of earlier blocks are scaled down.
#pragma once

#include <math.h>
#include <stdint.h>

#include "attention/exponential.h"
#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

template <class Lanes>
struct OnlineSoftmax {
    using Vector = typename Lanes::Vector;
    static constexpr uint32_t width = Lanes::width;

    alignas(64) float weights[max_group][block_tokens];  // weights of the current block; before that its logits
    alignas(64) float rescale[max_group];                // factors for sums over the earlier blocks
    alignas(64) float highest[max_group];                // highest logit so far
    alignas(64) float sums[max_group][width];            // sums of weights, one for each lane

    void start(uint32_t group) {
        for (uint32_t head = 0; head < group; ++head) {
            Lanes::store(sums[head], Lanes::zero());
        }
        for (uint32_t head = 0; head < max_group; ++head) {
            highest[head] = -__FLT_MAX__;  // not -inf: the difference of two highest logits must not be NaN
            rescale[head] = 0.0f;
        }
    }

    // Replace the block's logits in `weights` by weights. Tokens behind the block's last token get weight 0, whatever
    // their logits.
    void logits_to_weights(uint32_t group, uint32_t tokens) {
        for (uint32_t head = 0; head < group; ++head) {
            for (uint32_t token = tokens; token < block_tokens; ++token) {
                weights[head][token] = -INFINITY;
            }
            Vector most = Lanes::load(weights[head]);
#pragma GCC unroll 8
            for (uint32_t t = width; t < block_tokens; t += width) {
                most = Lanes::max(most, Lanes::load(&weights[head][t]));
            }
            const float before = highest[head];
            const float logit = Lanes::highest(most);
            highest[head] = logit > before ? logit : before;
            rescale[head] = before - highest[head];
        }
        for (uint32_t head = 0; head < group; head += width) {
            Lanes::store(&rescale[head], exponential<Lanes>(Lanes::load(&rescale[head])));
        }
        for (uint32_t head = 0; head < group; ++head) {
            const Vector reference = Lanes::broadcast(highest[head]);
            Vector sum = Lanes::mul(Lanes::load(sums[head]), Lanes::broadcast(rescale[head]));
#pragma GCC unroll 8
            for (uint32_t t = 0; t < block_tokens; t += width) {
                const Vector weight = exponential<Lanes>(Lanes::sub(Lanes::load(&weights[head][t]), reference));
                Lanes::store(&weights[head][t], weight);
                sum = Lanes::add(sum, weight);
            }
            Lanes::store(sums[head], sum);
        }
    }

    float normalisation(uint32_t head) const { return 1.0f / Lanes::sum(Lanes::load(sums[head])); }

    float lse(uint32_t head) const { return highest[head] + logf(Lanes::sum(Lanes::load(sums[head]))); }
};

}  // namespace
}  // namespace sglang_hybrid
