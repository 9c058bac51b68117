// Adds weighted values for several heads and dimensions at once: a tile of the output that stays in registers for a block.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "attention/block_list.h"
#include "attention/neon_requests.h"
#include "attention/neon_steps.h"

namespace sglang_hybrid {
namespace {

// Vectors of dimensions in a tile, and number of tokens whose values are in registers at a time. With a register of weights
// for each head, a tile takes 17 to 28 registers.
template <uint32_t heads>
constexpr uint32_t output_vectors = heads == 1   ? 8
                                    : heads <= 3 ? 4
                                                 : 2;
template <uint32_t heads>
constexpr uint32_t value_tokens = (heads <= 6 ? 8 : 4) / output_vectors<heads>;

constexpr uint32_t weight_tokens = 4;  // tokens whose weights of one head are in a register

// Scale a tile of the output by `rescale` and add a block's weighted values. `output` is [heads][output_vectors][4]; the
// weights of consecutive heads are `block_tokens` floats apart. `tokens` is a multiple of `weight_tokens`. Not inlined for the
// same reason as compute_logits_of.
template <DType dtype, uint32_t heads>
__attribute__((noinline)) void add_values_to(float* output, const float* rescale, const float* weights, uint32_t tokens,
                                             const char* values, uint64_t row_bytes, TwoLevelLines& lines_ahead) {
    constexpr uint32_t vectors = output_vectors<heads>;
    constexpr uint32_t at_once = value_tokens<heads>;
    constexpr uint32_t lines = weight_tokens * vectors * vector_bytes<dtype> / cache_line;

    TwoLevelLines ahead = lines_ahead;
    float32x4_t sum[heads][vectors];
#pragma GCC unroll 8
    for (uint32_t h = 0; h < heads; ++h) {
        const float32x4_t factor = vld1q_dup_f32(rescale + h);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < vectors; ++i) {
            sum[h][i] = vmulq_f32(vld1q_f32(output + (h * vectors + i) * vector_width), factor);
        }
    }
    float32x4_t value[at_once][vectors];
#pragma GCC unroll 4
    for (uint32_t t = 0; t < at_once; ++t) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < vectors; ++i) {
            value[t][i] = load_four<dtype>(values + t * row_bytes + i * vector_bytes<dtype>);
        }
    }
    const char* const last = values + (tokens - at_once) * row_bytes;
#pragma GCC unroll 1
    for (bool more = true; more; weights += weight_tokens) {
        ahead.request<lines>();
        float32x4_t weight[heads];
#pragma GCC unroll 8
        for (uint32_t h = 0; h < heads; ++h) {
            weight[h] = vld1q_f32(weights + h * block_tokens);
        }
#pragma GCC unroll 4
        for (uint32_t token = 0; token < weight_tokens; token += at_once) {
            more = values != last;
            values += more ? at_once * row_bytes : 0;
#pragma GCC unroll 4
            for (uint32_t t = 0; t < at_once; ++t) {
#pragma GCC unroll 8
                for (uint32_t i = 0; i < vectors; ++i) {
#pragma GCC unroll 8
                    for (uint32_t h = 0; h < heads; ++h) {
                        add_product(sum[h][i], value[t][i], weight[h], token + t);
                    }
                    value[t][i] = load_four<dtype>(values + t * row_bytes + i * vector_bytes<dtype>);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < vectors; ++i) {
            vst1q_f32(output + (h * vectors + i) * vector_width, sum[h][i]);
        }
    }
    lines_ahead = ahead;
}

}  // namespace
}  // namespace sglang_hybrid
