// Partial keys: the first columns of keys in another basis, of new tokens and of whole pages.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/speculation_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t encode_threads = 128;
inline constexpr uint32_t encode_tokens_each = 4;  // of a thread at a time: a value of the basis is read once for them
inline constexpr uint32_t most_key_dim = 128;

// By a whole CTA: vectors [count][head_dim] in shared memory times the basis of a KV head; write(vector, column, sum).
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

// By a whole CTA: codes of `count` tokens of a block from token `first` on. key_at(token, channel): bits of a value.
template <class Element, class KeyAt>
__device__ void encode_block(const sh_partial_keys& partial, uint32_t page, uint32_t head, uint32_t first, uint32_t count,
                             float* shared, KeyAt key_at) {
    for (uint32_t i = threadIdx.x; i < count * partial.head_dim; i += blockDim.x) {
        shared[i] = widened<Element>(key_at(i / partial.head_dim, i % partial.head_dim));
    }
    __syncthreads();
    const uint64_t block = uint64_t{page} * partial.kv_heads + head;
    auto* const codes = static_cast<uint16_t*>(partial.codes) + (block * block_tokens + first) * partial.columns;
    times_basis(shared, count, partial, head, [&](uint32_t token, uint32_t column, float sum) {
        codes[token * partial.columns + column] = static_cast<uint16_t>(Element::pack(sum, 0.0f));
    });
}

__device__ inline bool has_page(const sh_partial_keys& partial, int32_t page) {
    return page >= 0 && static_cast<uint32_t>(page) < partial.pages;
}

// A CTA for each (batch entry, KV head).
template <class Element>
__global__ void __launch_bounds__(encode_threads) encode_tokens(const __grid_constant__ sh_encode_tokens args) {
    __shared__ float key[most_key_dim];
    const uint32_t entry = blockIdx.x / args.partial.kv_heads, head = blockIdx.x % args.partial.kv_heads;
    if (entry >= active_of(args.step.active_rows, args.step.batch)) return;
    const int32_t last = args.step.lengths[entry] - 1;
    if (last < 0 || last >= static_cast<int32_t>(args.step.max_blocks * block_tokens)) return;
    const uint32_t token = static_cast<uint32_t>(last);
    const int32_t page = args.step.page_table[uint64_t{entry} * args.step.max_blocks + token / block_tokens];
    if (!has_page(args.partial, page)) return;
    const auto* const from = static_cast<const uint16_t*>(args.keys) + entry * args.key_stride + head * args.partial.head_dim;
    encode_block<Element>(args.partial, static_cast<uint32_t>(page), head, token % block_tokens, 1, key,
                          [&](uint32_t, uint32_t channel) { return from[channel]; });
}

// A CTA for each (page of the list, KV head).
template <class Element>
__global__ void __launch_bounds__(encode_threads) encode_pages(const __grid_constant__ sh_encode_pages args) {
    extern __shared__ __align__(16) float keys[];
    const uint32_t index = blockIdx.x / args.partial.kv_heads, head = blockIdx.x % args.partial.kv_heads;
    const int32_t page = args.pages[index];
    if (!has_page(args.partial, page)) return;
    const uint32_t filled = static_cast<uint32_t>(min(max(args.filled[index], 0), static_cast<int32_t>(block_tokens)));
    const auto* const from = static_cast<const uint16_t*>(args.keys) + index * args.page_stride + head * args.head_stride;
    encode_block<Element>(args.partial, static_cast<uint32_t>(page), head, 0, filled, keys,
                          [&](uint32_t token, uint32_t channel) { return from[token * args.token_stride + channel]; });
}

}  // namespace sglang_hybrid::cuda
