// Softmax of the logits of a row, choice of the fewest tokens of each query head that have a share of its attention, and lists
// of the blocks that have such tokens.
#pragma once

#include "sglang_hybrid/cuda/key_codes.cuh"
#include "sglang_hybrid/cuda/weight_share.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t list_threads = 256;
inline constexpr uint32_t list_warps = list_threads / 32;
inline constexpr uint32_t kept_share_units = 1u << 20;  // of sh_keep_tokens.counted

// Combine a number of each thread, always in the same order, and return the result. Called by the whole CTA.
template <class Combine>
__device__ float of_all_threads(float mine, Combine combine) {
    __shared__ float of_warp[share_warps];
    for (uint32_t step = 16; step > 0; step /= 2) mine = combine(mine, __shfl_xor_sync(0xFFFFFFFF, mine, step));
    __syncthreads();  // all threads are done with this memory
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    float all = of_warp[0];
    for (uint32_t warp = 1; warp < share_warps; ++warp) all = combine(all, of_warp[warp]);
    return all;
}

// A CTA for each (batch entry, query head). Logits that are NaN or infinite weigh nothing.
__global__ void __launch_bounds__(share_threads) keep_tokens(const __grid_constant__ sh_keep_tokens args) {
    const sh_step& step = args.step;
    const uint32_t entry = blockIdx.x / (args.kv_heads * args.group);
    if (entry >= active_of(step.active_rows, step.batch)) return;
    const uint32_t blocks = row_blocks(step, entry);
    if (!blocks) return;
    const uint32_t length = static_cast<uint32_t>(step.lengths[entry]);
    float* const weights = args.weights + uint64_t{blockIdx.x} * step.max_blocks * block_tokens;
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto sum = [](float a, float b) { return a + b; };

    float mine = -FLT_MAX;
    for (uint32_t i = threadIdx.x; i < length; i += share_threads) mine = fmaxf(mine, or_lowest(weights[i]));
    const float largest = of_all_threads(mine, larger);
    mine = 0;
    for (uint32_t i = threadIdx.x; i < length; i += share_threads) {
        const float logit = or_lowest(weights[i]), weight = logit == -FLT_MAX ? 0.0f : exp2f(logit - largest);
        weights[i] = weight;
        mine += weight;
    }
    const float total = of_all_threads(mine, sum);
    __syncthreads();  // all weights are written

    const auto weight_of = [&](uint32_t i) { return weights[i]; };
    const bool everything = args.least >= 1 || !(total > 0);
    const Share share = everything ? whole_share() : find_share(length, weight_of, __float_as_uint(1.0f), args.least);
    // The divisor of kept weights is known only when all of them are.
    float kept = 0;
    uint32_t count = 0;
    for_each_entry(length, weight_of, share, [&](uint32_t i, float weight, bool is_kept) {
        weights[i] = is_kept ? weight : 0.0f;
        if (is_kept) kept += weight, ++count;
    });
    const float divisor = args.renormalises ? of_all_threads(kept, sum) : total;
    // each thread divides the weights that it has just written; zeros behind the last token, since lists are of whole blocks
    for (uint32_t i = threadIdx.x; i < blocks * block_tokens; i += share_threads) {
        weights[i] = i < length && weights[i] > 0 ? weights[i] / divisor : 0.0f;
    }
    if (!args.counted) return;
    const float all = of_all_threads(static_cast<float>(count), sum);
    const double units = static_cast<double>(all) * kept_share_units / length;
    if (threadIdx.x == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(args.counted), static_cast<unsigned long long>(units));
    }
}

// List the blocks of which a query head keeps a token, in their order. A CTA for each (batch entry, KV head); a warp checks 32
// blocks at a time.
__global__ void __launch_bounds__(list_threads) list_kept(const __grid_constant__ sh_keep_tokens args) {
    __shared__ uint32_t of_warp[list_warps];
    const sh_step& step = args.step;
    const uint32_t pair = blockIdx.x, entry = pair / args.kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (entry >= active_of(step.active_rows, step.batch)) return;
    const uint32_t blocks = row_blocks(step, entry);
    const int32_t* const table = step.page_table + uint64_t{entry} * step.max_blocks;
    const float* const weights = args.weights + uint64_t{pair} * args.group * step.max_blocks * block_tokens;
    int32_t* const pages = args.pages + uint64_t{pair} * step.max_blocks;
    int32_t* const positions = args.positions + uint64_t{pair} * step.max_blocks;
    uint32_t listed = 0;
    for (uint32_t first = 0; first < blocks; first += list_threads) {
        const uint32_t begin = first + warp * 32;
        uint32_t found = 0;
        for (uint32_t i = 0; i < 32 && begin + i < blocks; ++i) {
            bool is_kept = false;
            for (uint32_t g = 0; g < args.group; ++g) {
                is_kept |= weights[(uint64_t{g} * step.max_blocks + begin + i) * block_tokens + lane] != 0;
            }
            const int32_t page = table[begin + i];
            const bool in_pool = page >= 0 && static_cast<uint32_t>(page) < args.pool_pages;
            if (__any_sync(0xFFFFFFFF, is_kept) && in_pool) found |= 1u << i;
        }
        if (lane == 0) of_warp[warp] = static_cast<uint32_t>(__popc(found));
        __syncthreads();
        uint32_t place = listed + static_cast<uint32_t>(__popc(found & ((1u << lane) - 1)));
        for (uint32_t other = 0; other < list_warps; ++other) {
            if (other < warp) place += of_warp[other];
            listed += of_warp[other];
        }
        if (found >> lane & 1) {
            pages[place] = table[begin + lane];
            positions[place] = static_cast<int32_t>(begin + lane);
        }
        __syncthreads();  // before other threads overwrite what this one still reads
    }
    if (threadIdx.x == 0) args.counts[pair] = static_cast<int32_t>(listed);
}

}  // namespace sglang_hybrid::cuda
