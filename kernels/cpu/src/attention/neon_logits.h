// Computes the logits of several heads and tokens at once: a tile of dot products whose sums all stay in registers.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "attention/block_list.h"
#include "attention/neon_requests.h"
#include "attention/neon_steps.h"

namespace sglang_hybrid {
namespace {

// Tokens of a tile. Beside the sums, registers hold the keys of this step and of the next one.
template <uint32_t heads>
constexpr uint32_t logit_tokens = heads <= 5 ? 4 : 2;

template <DType dtype, uint32_t tokens>
inline void load_keys(float32x4_t (&key)[tokens], const char* from, uint64_t row_bytes) {
#pragma GCC unroll 4
    for (uint32_t t = 0; t < tokens; ++t) {
        key[t] = load_four<dtype>(from + t * row_bytes);
    }
}

// to[i] = sum of the lanes of v[i]
inline void store_sums(float* to, const float32x4_t (&v)[2]) {
    const float32x4_t both = vpaddq_f32(v[0], v[1]);
    vst1_f32(to, vpadd_f32(vget_low_f32(both), vget_high_f32(both)));
}

inline void store_sums(float* to, const float32x4_t (&v)[4]) {
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
}

// Write the logits of a tile. `query` is [head_dim / 4][heads][4]; the logits of consecutive heads are `block_tokens` floats
// apart. Not inlined: versions for different numbers of heads, inlined side by side, would keep their sums in memory.
template <DType dtype, uint32_t heads>
__attribute__((noinline)) void compute_logits_of(const float* query, const char* keys, uint64_t row_bytes, float* logits,
                                                 TwoLevelLines& lines_ahead) {
    constexpr uint32_t tokens = logit_tokens<heads>;
    constexpr uint32_t lines = (2 * tokens * vector_bytes<dtype> + cache_line - 1) / cache_line;

    TwoLevelLines ahead = lines_ahead;
    float32x4_t sum[heads][tokens];
#pragma GCC unroll 8
    for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t t = 0; t < tokens; ++t) {
            sum[h][t] = vdupq_n_f32(0.0f);
        }
    }
    const char* const last = keys + row_bytes - vector_bytes<dtype>;
    float32x4_t key[2][tokens];
    load_keys<dtype>(key[0], keys, row_bytes);
#pragma GCC unroll 1
    for (bool more = true; more;) {
        ahead.request<lines>();
#pragma GCC unroll 2
        for (uint32_t step = 0; step < 2; ++step) {
            more = keys != last;
            keys += more ? vector_bytes<dtype> : 0;
            load_keys<dtype>(key[1 - step], keys, row_bytes);
#pragma GCC unroll 8
            for (uint32_t h = 0; h < heads; ++h, query += vector_width) {
                const float32x4_t four = vld1q_f32(query);
#pragma GCC unroll 4
                for (uint32_t t = 0; t < tokens; ++t) {
                    add_product(sum[h][t], key[step][t], four);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t h = 0; h < heads; ++h) {
        store_sums(logits + h * block_tokens, sum[h]);
    }
    lines_ahead = ahead;
}

}  // namespace
}  // namespace sglang_hybrid
