// Encoding of partial keys, the first columns of keys in another basis, for new tokens and for whole pages.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/new_keys.cuh"
#include "sglang_hybrid/cuda/speculation_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t encode_threads = 128;
inline constexpr uint32_t encode_tokens_each = 4;  // of a thread at a time: a value of the basis is read once for all of them
inline constexpr uint32_t most_key_dim = 128;

// Multiply vectors [count][head_dim] in shared memory by the basis of a KV head, and call write(vector, column, sum) for each
// result. Called by a whole CTA.
template <class Write>
__device__ void times_basis(const float* vectors, uint32_t count, const sh_partial_keys& partial, uint32_t head, Write write) {
    const uint32_t columns = partial.columns, dim = partial.head_dim;
    const float* const basis = partial.basis + uint64_t{head} * dim * columns;
    const uint32_t groups = (count + encode_tokens_each - 1) / encode_tokens_each;
    for (uint32_t i = threadIdx.x; i < groups * columns; i += blockDim.x) {
        const uint32_t column = i % columns, first = i / columns * encode_tokens_each;
        float sums[encode_tokens_each] = {};
        for (uint32_t d = 0; d < dim; ++d) {
            const float factor = basis[d * columns + column];
#pragma unroll
            for (uint32_t n = 0; n < encode_tokens_each; ++n) {
                if (first + n < count) sums[n] = fmaf(vectors[(first + n) * dim + d], factor, sums[n]);
            }
        }
        for (uint32_t n = 0; n < encode_tokens_each && first + n < count; ++n) write(first + n, column, sums[n]);
    }
}

__device__ inline bool has_page(const sh_partial_keys& partial, int32_t page) {
    return page >= 0 && static_cast<uint32_t>(page) < partial.pages;
}

// A CTA for each (block, KV head).
template <class Element>
__global__ void __launch_bounds__(encode_threads) encode_partial_keys(const __grid_constant__ sh_encode_partial_keys args) {
    extern __shared__ __align__(16) float keys[];  // of all tokens that a block can have
    const sh_partial_keys& to = args.to;
    const uint32_t index = blockIdx.x / to.kv_heads, head = blockIdx.x % to.kv_heads;
    const NewTokens tokens(args.source, index);
    if (!has_page(to, tokens.page) || !tokens.count) return;
    const uint16_t* const from = block_of(args.source, index, head);
    for (uint32_t i = threadIdx.x; i < tokens.count * to.head_dim; i += blockDim.x) {
        keys[i] = widened<Element>(from[i / to.head_dim * args.source.token_stride + i % to.head_dim]);
    }
    __syncthreads();
    const uint64_t block = uint64_t{static_cast<uint32_t>(tokens.page)} * to.kv_heads + head;
    auto* const codes = static_cast<uint16_t*>(to.codes) + (block * block_tokens + tokens.first) * to.columns;
    times_basis(keys, tokens.count, to, head, [&](uint32_t token, uint32_t column, float sum) {
        codes[token * to.columns + column] = static_cast<uint16_t>(Element::pack(sum, 0.0f));
    });
}

}  // namespace sglang_hybrid::cuda
