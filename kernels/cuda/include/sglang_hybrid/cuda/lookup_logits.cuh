// Logits of quantised keys by adding up table entries (HCAttention, equation 3).
//
// A CTA has one list and `lookup_tile` of its tokens, whose sums stay in registers. Tables are far larger than shared memory
// (64 groups of 8,192 centroids take 2 MiB), so the CTA walks over as many groups at a time as fit. An index beyond the table
// reads its last entry: codes of slots without a token may be anything.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sglang_hybrid/cuda/weights_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t lookup_threads = 256;
inline constexpr uint32_t lookup_tokens = 4;  // tokens of a thread
inline constexpr uint32_t lookup_tile = lookup_threads * lookup_tokens;
inline constexpr uint32_t lookup_shared_bytes = 96 << 10;  // two CTAs fit on a processor

// Return the number of groups whose tables are in shared memory together.
inline uint32_t lookup_groups(uint32_t groups, uint32_t centroids) {
    const uint32_t fit = lookup_shared_bytes / (centroids * uint32_t{sizeof(float)});
    return fit < groups ? fit : groups;
}

template <class Index>
__global__ void __launch_bounds__(lookup_threads)
    lookup_logits(const __grid_constant__ sh_lookup_logits args, uint32_t at_a_time) {
    extern __shared__ float entries[];
    const uint32_t tiles = (args.tokens + lookup_tile - 1) / lookup_tile;
    const uint32_t list = blockIdx.x / tiles, first = blockIdx.x % tiles * lookup_tile + threadIdx.x;
    const float* const table = args.tables + uint64_t{list} * args.groups * args.centroids;
    const auto* const codes = static_cast<const Index*>(args.codes) + uint64_t{list / args.group} * args.tokens * args.groups;

    float sums[lookup_tokens] = {};
    for (uint32_t begin = 0; begin < args.groups; begin += at_a_time) {
        const uint32_t count = min(at_a_time, args.groups - begin);
        __syncthreads();  // all threads are done with the tables before these
        for (uint32_t i = threadIdx.x; i < count * args.centroids; i += lookup_threads) {
            entries[i] = table[uint64_t{begin} * args.centroids + i];
        }
        __syncthreads();
#pragma unroll
        for (uint32_t t = 0; t < lookup_tokens; ++t) {
            const uint32_t token = first + t * lookup_threads;
            if (token >= args.tokens) break;
            const Index* const code = codes + uint64_t{token} * args.groups + begin;
            for (uint32_t g = 0; g < count; ++g) {
                sums[t] += entries[g * args.centroids + min(uint32_t{code[g]}, args.centroids - 1)];
            }
        }
    }
#pragma unroll
    for (uint32_t t = 0; t < lookup_tokens; ++t) {
        const uint32_t token = first + t * lookup_threads;
        if (token < args.tokens) args.logits[uint64_t{list} * args.tokens + token] = sums[t];
    }
}

}  // namespace sglang_hybrid::cuda
