// Digests and codes of blocks whose keys are in shared memory: `minmax_digest` and `sketch_codes` of the reference.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/compact.cuh"
#include "sglang_hybrid/cuda/fp8.cuh"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/new_keys.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t digest_threads = 128;
struct SharedBlock {
    uint16_t keys[block_tokens * max_head_dim];
    float highest[max_head_dim];
    float lowest[max_head_dim];
};

// Return the step of [lowest, highest] that a value is in; 0 for NaN, and if there is no range.
__device__ inline uint32_t code_of(float value, float highest, float lowest) {
    const float step = (highest - lowest) / float(compact_levels);
    return static_cast<uint32_t>(fminf(fmaxf((value - lowest) / step, 0.0f), float(compact_levels - 1)));
}

// Write the compact digest of a block whose extremes are known, and replace the extremes by those that a reader gets from the
// digest: codes are positions in that range. head_dim is a multiple of 32, so that warps have no idle lanes. Called by a whole
// CTA.
__device__ inline void write_compact(SharedBlock& block, const sh_digests& to, uint64_t index, uint32_t head) {
    const uint32_t dim = to.head_dim, bytes = compact_bytes(dim, to.channel_count);
    auto* const compact = static_cast<uint8_t*>(to.digests) + index * bytes;
    auto* const steps = reinterpret_cast<uint16_t*>(compact + compact_steps(dim));
    auto* const scales = reinterpret_cast<uint16_t*>(compact + compact_scales(dim, to.channel_count));
    const int64_t* const channels = to.channels + uint64_t{head} * to.channel_count;
    __syncthreads();  // the extremes are written
    for (uint32_t i = threadIdx.x; i < to.channel_count; i += blockDim.x) {
        const uint32_t channel = min(static_cast<uint32_t>(channels[i]), dim - 1);
        steps[step_place(i)] = to_half((block.highest[channel] - block.lowest[channel]) / float(compact_levels));
    }
    __syncthreads();  // the extremes were read
    for (uint32_t channel = threadIdx.x; channel < dim; channel += blockDim.x) {
        const float highest = block.highest[channel], lowest = block.lowest[channel], middle = (highest + lowest) / 2;
        // compared as bits: there NaN is larger than infinity, and infinity larger than all numbers
        uint32_t largest = __float_as_uint(fabsf(middle));
#pragma unroll
        for (uint32_t step = compact_group / 2; step; step /= 2) {
            largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        }
        const uint16_t scale = to_half(__uint_as_float(largest) / 127.0f);
        const float unit = widened<Float16>(scale);
        const float level = unit > 0 && unit < INFINITY ? fminf(fmaxf(rintf(middle / unit), -127.0f), 127.0f) : 0.0f;
        compact[channel] = static_cast<uint8_t>(level + 128.0f);
        if (channel % compact_group == 0) scales[channel / compact_group] = scale;
        const float radius = widened<Float16>(to_half((highest - lowest) / float(compact_levels))) * (compact_levels / 2);
        block.highest[channel] = level * unit + radius;
        block.lowest[channel] = level * unit - radius;
    }
    for (uint32_t at = compact_scales(dim, to.channel_count) + dim / compact_group * 2 + threadIdx.x; at < bytes;
         at += blockDim.x) {
        compact[at] = 0;
    }
}

// Write the digest and the codes of block.keys [32][head_dim], of which the first `filled` tokens exist. Called by a whole CTA.
template <class Element>
__device__ void digest_block(SharedBlock& block, uint32_t filled, const sh_digests& to, uint32_t page, uint32_t head) {
    const uint32_t dim = to.head_dim;
    const uint64_t index = uint64_t{page} * to.kv_heads + head;
    __syncthreads();  // the keys are written
    auto* const digest = static_cast<uint16_t*>(to.digests) + index * 2 * dim;
    for (uint32_t channel = threadIdx.x; channel < dim; channel += blockDim.x) {
        uint16_t most = block.keys[channel], least = most;
        float highest = widened<Element>(most), lowest = highest;
        for (uint32_t token = 1; token < filled; ++token) {
            const uint16_t bits = block.keys[token * dim + channel];
            const float value = widened<Element>(bits);
            // NaN stays, as in torch's maximum: the digest must show that the page is damaged
            if (highest == highest && !(value <= highest)) highest = value, most = bits;
            if (lowest == lowest && !(value >= lowest)) lowest = value, least = bits;
        }
        if (!to.compact) digest[channel] = most, digest[dim + channel] = least;
        block.highest[channel] = highest;
        block.lowest[channel] = lowest;
    }
    if (!to.channel_count) return;
    if (to.compact) write_compact(block, to, index, head);
    __syncthreads();
    const int64_t* const channels = to.channels + uint64_t{head} * to.channel_count;
    // Tokens that do not exist yet get codes next to the middle of the range, on either side of it in turn.
    const auto code = [&](uint32_t token, uint32_t which) {
        if (token >= filled) return compact_levels / 2 - 1 + which % 2;
        const uint32_t channel = min(static_cast<uint32_t>(channels[which]), dim - 1);
        const float value = widened<Element>(block.keys[token * dim + channel]);
        return code_of(value, block.highest[channel], block.lowest[channel]);
    };
    const uint32_t row = to.channel_count / 2;  // bytes of a token: of two channels the first in the low bits
    uint8_t* const codes = to.codes + index * block_tokens * row;
    for (uint32_t i = threadIdx.x; i < block_tokens * row; i += blockDim.x) {
        const uint32_t token = i / row, first = i % row * 2;
        codes[i] = static_cast<uint8_t>(code(token, first) | code(token, first + 1) << 4);
    }
}

// A CTA for each (page of the list, KV head). Keys are of type `Stored`; digests are computed from them as `Element`s.
template <class Element, class Stored>
__global__ void __launch_bounds__(digest_threads) digest_pages(const __grid_constant__ sh_digest_pages args) {
    __shared__ __align__(16) SharedBlock block;
    const uint32_t index = blockIdx.x / args.digests.kv_heads, head = blockIdx.x % args.digests.kv_heads;
    const int32_t page = args.source.pages[index];
    if (page < 0 || static_cast<uint32_t>(page) >= args.digests.pages) return;
    const uint32_t filled = static_cast<uint32_t>(min(max(args.source.filled[index], 1), static_cast<int32_t>(block_tokens)));
    const uint32_t row_chunks = args.digests.head_dim / 8;
    using Chunk = Eight<Element, Stored>;
    using Value = std::conditional_t<value_bytes<Stored> == 1, uint8_t, uint16_t>;
    const Value* const keys = block_of<Value>(args.source, index, head);
    for (uint32_t i = threadIdx.x; i < filled * row_chunks; i += digest_threads) {
        const auto* const from = keys + i / row_chunks * args.source.token_stride + i % row_chunks * 8;
        reinterpret_cast<uint4*>(block.keys)[i] = Chunk::widened(*reinterpret_cast<const typename Chunk::Bits*>(from));
    }
    digest_block<Element>(block, filled, args.digests, static_cast<uint32_t>(page), head);
}

}  // namespace sglang_hybrid::cuda
