// Attention weights of single tokens in fp32 vectors, for any Lanes of vector_kernel.h.
#pragma once

#include <stdint.h>

#include "attention/exponential.h"
#include "attention/vector_kernel.h"

namespace sglang_hybrid {
namespace {

constexpr float largest_exponent = 88.0f;  // e^88 is a finite float, e^89 is not

// Write the weights of block `index` from its `logits` [group][32]. Bit t of `counted`: token t counts. Logits of other tokens
// may be anything.
template <class Lanes>
inline void store_weights(const BlockAttention& work, uint32_t index, uint32_t counted, const float (*logits)[block_tokens],
                          float* weights, uint64_t stride) {
    using Vector = typename Lanes::Vector;
    for (uint32_t head = 0; head < work.group; ++head) {
        float* const to = weights + head * stride + uint64_t{index} * block_tokens;
        const float lse = work.lse[head];
        const uint32_t asked = lse == -INFINITY ? 0 : counted;
        for (uint32_t t = 0; asked != 0 && t < block_tokens; t += Lanes::width) {
            const Vector below = Lanes::sub(Lanes::broadcast(lse), Lanes::load(&logits[head][t]));
            const Vector x = Lanes::sub(Lanes::zero(), Lanes::max(below, Lanes::broadcast(-largest_exponent)));
            Lanes::store(to + t, exponential<Lanes>(x));
        }
        for (uint32_t t = 0; t < block_tokens; ++t) {
            if (!(asked >> t & 1)) {
                to[t] = 0.0f;
            }
        }
    }
}

// Return the tokens of block `index` that count, as bits: those below `tokens` and in the block's mask.
inline uint32_t counted_tokens(const BlockAttention& work, uint32_t index, uint32_t tokens) {
    const uint32_t filled = tokens == block_tokens ? ~0u : (1u << tokens) - 1;
    return work.masks ? work.masks[index] & filled : filled;
}

template <class Lanes, DType dtype, uint32_t dim>
inline void weights_in_vectors(const BlockAttention& work, float* weights, uint64_t stride) {
    using State = RunningAttention<Lanes, dim>;
    constexpr uint32_t row_bytes = State::template row_bytes<dtype>;
    if (work.count == 0) {
        return;
    }
    State state;
    state.template start<dtype>(work);
    for (uint32_t index = 0; index < work.count; ++index) {
        const Block block = block_of(work, index);
        const uint32_t counted = counted_tokens(work, index, block.tokens);
        const Block next = index + 1 < work.count ? block_of(work, index + 1) : Block{};
        LineStream next_keys(next.keys, next.tokens * row_bytes);
        if (counted != 0) {
            state.template compute_logits<dtype>(block, next_keys);
        }
        next_keys.request_all();
        store_weights<Lanes>(work, index, counted, state.logits(), weights, stride);
    }
}

template <class Lanes, DType dtype>
inline WeightKernel vector_weight_kernel_of(uint32_t head_dim) {
    switch (head_dim) {
        case 64: return weights_in_vectors<Lanes, dtype, 64>;
        case 96: return weights_in_vectors<Lanes, dtype, 96>;
        case 128: return weights_in_vectors<Lanes, dtype, 128>;
        case 256: return weights_in_vectors<Lanes, dtype, 256>;
        default: return nullptr;
    }
}

template <class Lanes>
inline WeightKernel vector_weight_kernel(DType dtype, uint32_t head_dim) {
    switch (dtype) {
        case DType::bf16: return vector_weight_kernel_of<Lanes, DType::bf16>(head_dim);
        case DType::fp16: return vector_weight_kernel_of<Lanes, DType::fp16>(head_dim);
        case DType::fp32: return vector_weight_kernel_of<Lanes, DType::fp32>(head_dim);
        case DType::fp8_bf16:
        case DType::fp8_fp16:
        case DType::fp8_fp32: return vector_weight_kernel_of<Lanes, fp8>(head_dim);
    }
    return nullptr;
}

}  // namespace
}  // namespace sglang_hybrid
