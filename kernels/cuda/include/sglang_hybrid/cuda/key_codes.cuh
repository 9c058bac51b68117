// Codes of keys in device memory: their addresses, and the encoding of keys (`nearest_centroids` of the reference).
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/kept_tokens_api.h"
#include "sglang_hybrid/cuda/new_keys.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t code_threads = 128;
inline constexpr uint32_t code_warps = code_threads / 32;
inline constexpr uint32_t tokens_at_once = 8;  // of a warp: it reads a centroid once for all of them
inline constexpr uint32_t code_lanes = 32;

__device__ inline bool is_page_of(const sh_key_codes& codes, int32_t page) {
    return page >= 0 && static_cast<uint32_t>(page) < codes.pages;
}

__device__ inline uint8_t* block_codes(const sh_key_codes& codes, int32_t page, uint32_t head) {
    const uint64_t block = uint64_t{static_cast<uint32_t>(page)} * codes.kv_heads + head;
    return static_cast<uint8_t*>(codes.codes) + block * block_tokens * codes.code_bytes;
}

// Return the codebook of a part of keys, [count][part].
__device__ inline const float* codebook_of(const sh_key_codes& codes, uint32_t head, uint32_t group) {
    const uint64_t part = codes.head_dim / codes.groups, book = group < codes.books ? group : 0;
    return codes.centroids + (uint64_t{head} * codes.books + book) * codes.count * part;
}

// Write the nearest centroid of one part of `tokens` keys, which are in shared memory as [token][head_dim] floats. The lanes
// share the centroids. Of two centroids that are equally near, the first counts. Called by a warp.
__device__ inline void encode_part(const sh_key_codes& to, const float* keys, uint32_t tokens, uint32_t head, uint32_t group,
                                   uint8_t* codes) {
    const uint32_t part = to.head_dim / to.groups, lane = threadIdx.x % code_lanes;
    const float* const book = codebook_of(to, head, group);
    float least[tokens_at_once];
    uint32_t nearest[tokens_at_once];
#pragma unroll
    for (uint32_t t = 0; t < tokens_at_once; ++t) least[t] = INFINITY, nearest[t] = 0;
    for (uint32_t c = lane; c < to.count; c += code_lanes) {
        float far[tokens_at_once] = {}, square = 0;
        for (uint32_t i = 0; i < part; ++i) {
            const float value = book[uint64_t{c} * part + i];
            square += value * value;
#pragma unroll
            for (uint32_t t = 0; t < tokens_at_once; ++t) {
                if (t < tokens) far[t] -= keys[t * to.head_dim + group * part + i] * value;
            }
        }
#pragma unroll
        for (uint32_t t = 0; t < tokens_at_once; ++t) {
            far[t] += square / 2;
            if (far[t] < least[t]) least[t] = far[t], nearest[t] = c;
        }
    }
#pragma unroll
    for (uint32_t t = 0; t < tokens_at_once; ++t) {
        for (uint32_t step = code_lanes / 2; step; step /= 2) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, least[t], step);
            const uint32_t index = __shfl_xor_sync(0xFFFFFFFF, nearest[t], step);
            const bool is_nearer = other < least[t] || (other == least[t] && index < nearest[t]);
            if (is_nearer) least[t] = other, nearest[t] = index;
        }
        if (lane || t >= tokens) continue;
        uint8_t* const code = codes + uint64_t{t} * to.code_bytes + group * to.index_bytes;
        code[0] = static_cast<uint8_t>(nearest[t]);
        if (to.index_bytes == 2) code[1] = static_cast<uint8_t>(nearest[t] >> 8);
    }
}

// A CTA for each (block, KV head).
template <class Element>
__global__ void __launch_bounds__(code_threads) encode_keys(const __grid_constant__ sh_encode_keys args) {
    __shared__ float keys[tokens_at_once * max_head_dim];
    const sh_key_codes& to = args.to;
    const uint32_t index = blockIdx.x / to.kv_heads, head = blockIdx.x % to.kv_heads, dim = to.head_dim;
    const NewTokens tokens(args.source, index);
    if (!is_page_of(to, tokens.page) || !tokens.count) return;
    uint8_t* const codes = block_codes(to, tokens.page, head) + uint64_t{tokens.first} * to.code_bytes;
    const uint16_t* const from = block_of(args.source, index, head);
    if (!to.centroids) {
        auto* const whole = reinterpret_cast<uint16_t*>(codes);
        for (uint32_t i = threadIdx.x; i < tokens.count * dim; i += code_threads) {
            whole[i] = from[i / dim * args.source.token_stride + i % dim];
        }
        return;
    }
    for (uint32_t begin = 0; begin < tokens.count; begin += tokens_at_once) {
        const uint32_t count = min(tokens_at_once, tokens.count - begin);
        __syncthreads();  // all threads are done with the keys before these
        for (uint32_t i = threadIdx.x; i < count * dim; i += code_threads) {
            keys[i] = widened<Element>(from[(begin + i / dim) * args.source.token_stride + i % dim]);
        }
        __syncthreads();
        for (uint32_t group = threadIdx.x / code_lanes; group < to.groups; group += code_warps) {
            encode_part(to, keys, count, head, group, codes + uint64_t{begin} * to.code_bytes);
        }
    }
}

}  // namespace sglang_hybrid::cuda
