// Logits of all tokens of rows, computed from the codes of their keys. Kernels find codes through the page table: no codes are
// gathered.
//
// Quantised keys (HCAttention, equation 3): a CTA has one query head and `lookup_row_tile` tokens of its row. It computes the
// products of the query's parts with the centroids of as many groups as fit in shared memory, adds up the products that the
// codes name, and goes on to the next groups. Tables of all groups and query heads would take gigabytes.
#pragma once

#include "sglang_hybrid/cuda/block_logits.cuh"
#include "sglang_hybrid/cuda/key_codes.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t logit_tile_blocks = 64;  // blocks of a CTA
inline constexpr uint32_t lookup_row_threads = 256;
inline constexpr uint32_t lookup_row_tokens = 16;  // tokens of a thread
inline constexpr uint32_t lookup_row_tile = lookup_row_threads * lookup_row_tokens;
inline constexpr uint32_t lookup_row_bytes = 96 << 10;  // of tables: two CTAs fit on a processor

__device__ inline float* weights_of(float* weights, uint64_t query_head, uint32_t max_blocks) {
    return weights + query_head * max_blocks * block_tokens;
}

// A CTA for each (batch entry, KV head, tile of blocks).
template <class Element, int kDim>
__global__ void __launch_bounds__(logit_warps* warp_size) whole_key_logits(const __grid_constant__ sh_token_logits args) {
    extern __shared__ __align__(128) char shared[];
    const sh_step& step = args.step;
    const uint32_t tiles = (step.max_blocks + logit_tile_blocks - 1) / logit_tile_blocks;
    const uint32_t pair = blockIdx.x / tiles, first = blockIdx.x % tiles * logit_tile_blocks;
    const uint32_t entry = pair / args.codes.kv_heads, head = pair % args.codes.kv_heads;
    if (entry >= active_of(step.active_rows, step.batch)) return;
    const uint32_t blocks = row_blocks(step, entry);
    if (first >= blocks) return;
    const int32_t* const pages = step.page_table + uint64_t{entry} * step.max_blocks;
    const uint32_t length = static_cast<uint32_t>(step.lengths[entry]), count = min(blocks - first, logit_tile_blocks);
    const uint64_t query_head = uint64_t{pair} * args.group;
    const auto* const query = static_cast<const char*>(args.query) + query_head * kDim * 2;
    const BlockLogits<Element, kDim> logits_of(shared, query, args.group, args.scale);
    const auto block_of = [&](uint32_t i) -> KeyBlock {
        const int32_t page = pages[first + i];
        if (!is_page_of(args.codes, page)) return {nullptr, 0};
        const auto* const keys = reinterpret_cast<const char*>(block_codes(args.codes, page, head));
        return {keys, min(block_tokens, length - (first + i) * block_tokens)};
    };
    const uint32_t lane = threadIdx.x % warp_size;
    const auto write = [&](uint32_t i, uint32_t g, float logit) {
        weights_of(args.weights, query_head + g, step.max_blocks)[(first + i) * block_tokens + lane] = logit;
    };
    logits_of.for_each(count, block_of, [&](uint32_t i, uint32_t tokens, const float (&logits)[query_rows]) {
        if (lane >= tokens) return;
#pragma unroll
        for (uint32_t g = 0; g < query_rows; ++g) {
            if (g < args.group) write(i, g, logits[g]);
        }
    });
    for (uint32_t i = threadIdx.x / warp_size; i < count; i += logit_warps) {
        if (is_page_of(args.codes, pages[first + i])) continue;
        for (uint32_t g = 0; g < args.group; ++g) write(i, g, -INFINITY);
    }
}

// Return the number of groups whose tables are in shared memory together; 0: not even one fits.
inline uint32_t row_groups(uint32_t groups, uint32_t centroids) {
    const uint32_t fit = centroids ? lookup_row_bytes / (centroids * uint32_t{sizeof(float)}) : 0;
    return fit < groups ? fit : groups;
}

// A CTA for each (batch entry, query head, tile of tokens).
template <class Element, class Index>
__global__ void __launch_bounds__(lookup_row_threads)
    quantised_logits(const __grid_constant__ sh_token_logits args, uint32_t at_a_time) {
    extern __shared__ float table[];  // [groups at a time][centroids]
    const sh_key_codes& codes = args.codes;
    const sh_step& step = args.step;
    const uint32_t tiles = (step.max_blocks * block_tokens + lookup_row_tile - 1) / lookup_row_tile;
    const uint32_t query_head = blockIdx.x / tiles, first = blockIdx.x % tiles * lookup_row_tile + threadIdx.x;
    const uint32_t pair = query_head / args.group, entry = pair / codes.kv_heads, head = pair % codes.kv_heads;
    if (entry >= active_of(step.active_rows, step.batch)) return;
    const uint32_t blocks = row_blocks(step, entry);
    if (first - threadIdx.x >= blocks * block_tokens) return;
    const int32_t* const pages = step.page_table + uint64_t{entry} * step.max_blocks;
    const uint32_t length = static_cast<uint32_t>(step.lengths[entry]), part = codes.head_dim / codes.groups;
    const auto* const query = static_cast<const uint16_t*>(args.query) + uint64_t{query_head} * codes.head_dim;
    const float unit = args.scale * log2_e;

    float sums[lookup_row_tokens] = {};
    for (uint32_t begin = 0; begin < codes.groups; begin += at_a_time) {
        const uint32_t count = min(at_a_time, codes.groups - begin);
        __syncthreads();  // all threads are done with the tables before these
        for (uint32_t i = threadIdx.x; i < count * codes.count; i += lookup_row_threads) {
            const uint32_t group = begin + i / codes.count;
            const float* const centroid = codebook_of(codes, head, group) + uint64_t{i % codes.count} * part;
            float product = 0;
            for (uint32_t p = 0; p < part; ++p) product += widened<Element>(query[group * part + p]) * centroid[p];
            table[i] = product * unit;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t t = 0; t < lookup_row_tokens; ++t) {
            const uint32_t token = first + t * lookup_row_threads;
            if (token >= length) break;
            const int32_t page = pages[token / block_tokens];
            if (!is_page_of(codes, page)) {
                sums[t] = -INFINITY;
                continue;
            }
            const auto* const code = reinterpret_cast<const Index*>(block_codes(codes, page, head)) +
                                     uint64_t{token % block_tokens} * codes.groups + begin;
            for (uint32_t g = 0; g < count; ++g) {
                sums[t] += table[g * codes.count + min(uint32_t{code[g]}, codes.count - 1)];
            }
        }
    }
    float* const logits = weights_of(args.weights, query_head, step.max_blocks);
#pragma unroll
    for (uint32_t t = 0; t < lookup_row_tokens; ++t) {
        const uint32_t token = first + t * lookup_row_threads;
        if (token < length) logits[token] = sums[t];
    }
}

}  // namespace sglang_hybrid::cuda
