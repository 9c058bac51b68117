// Choice of the tokens that are attended, by their ranks, and of their places in staged blocks: `choose`, `list_of_tokens` and
// `list_of_blocks` of policies/infinigen/selection.py.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/best_blocks.cuh"
#include "sglang_hybrid/cuda/speculation_api.h"

namespace sglang_hybrid::cuda {

// Write the masks of chosen tokens of a (batch entry, KV head) to `chosen` [blocks]. Called by a whole CTA.
__device__ inline void mark_chosen(const sh_choose_tokens& args, uint32_t entry, uint32_t pair, uint32_t length,
                                   uint32_t* chosen, SelectMemory& memory) {
    const uint32_t blocks = (length + block_tokens - 1) / block_tokens, items = (args.by_block ? blocks : length) - 1;
    for (uint32_t i = threadIdx.x; i < blocks; i += select_threads) chosen[i] = 0;
    uint64_t wanted = 0;
    for (uint32_t head = 0; head < args.kv_heads; ++head) wanted += args.wanted[uint64_t{entry} * args.kv_heads + head];
    const auto number = static_cast<uint32_t>(min(wanted / args.kv_heads, uint64_t{min(items, args.limit - 1)}));
    __syncthreads();
    if (number) {
        const uint32_t* const ranks = args.ranks + uint64_t{pair} * args.step.max_blocks * (args.by_block ? 1 : block_tokens);
        const Threshold threshold = number == items ? Threshold{0, 0} : best_ranks(ranks, items, number, memory);
        take_best(ranks, items, threshold, memory, [&](uint32_t, uint32_t item) {
            if (args.by_block) chosen[item] = 0xFFFFFFFF;
            else atomicOr(&chosen[item / block_tokens], 1u << item % block_tokens);
        });
    }
    if (threadIdx.x == 0) {
        const uint32_t last = (length - 1) % block_tokens, own = 1u << last;
        atomicOr(&chosen[blocks - 1], args.by_block ? own | (own - 1) : own);
    }
    __syncthreads();
}

// A CTA for each (batch entry, KV head).
__global__ void __launch_bounds__(select_threads) choose_tokens(const __grid_constant__ sh_choose_tokens args) {
    __shared__ SelectMemory memory;
    const uint32_t pair = blockIdx.x, entry = pair / args.kv_heads, head = pair % args.kv_heads;
    if (entry >= active_of(args.step.active_rows, args.step.batch)) return;
    const int32_t length = args.step.lengths[entry];
    if (length < 1 || length > static_cast<int32_t>(args.step.max_blocks * block_tokens)) {
        if (threadIdx.x) return;
        args.counts[pair] = 0;
        if (head == 0) args.tokens[entry] = 0, args.places[entry] = -1;
        return;
    }
    uint32_t* const chosen = args.chosen + uint64_t{pair} * args.step.max_blocks;
    mark_chosen(args, entry, pair, static_cast<uint32_t>(length), chosen, memory);

    const uint32_t blocks = (static_cast<uint32_t>(length) + block_tokens - 1) / block_tokens;
    const int32_t* const table = args.step.page_table + uint64_t{entry} * args.step.max_blocks;
    const uint64_t list = uint64_t{pair} * args.most_blocks;
    uint32_t listed = 0, tokens = 0;
    for (uint32_t base = 0; base < blocks; base += select_threads) {
        const uint32_t block = base + threadIdx.x;
        const uint32_t mask = block < blocks ? __ldcg(&chosen[block]) : 0, count = static_cast<uint32_t>(__popc(mask));
        uint32_t all_listed, all_tokens;
        const uint32_t place = listed + sum_before(mask != 0, memory, all_listed);
        const uint32_t offset = tokens + sum_before(count, memory, all_tokens);
        if (mask && place < args.most_blocks) {
            args.pages[list + place] = table[block];
            args.masks[list + place] = static_cast<int32_t>(mask);
            args.offsets[list + place] = static_cast<int32_t>(offset);
        }
        listed += all_listed;
        tokens += all_tokens;
    }
    if (threadIdx.x) return;
    args.counts[pair] = static_cast<int32_t>(min(listed, args.most_blocks));
    if (args.counted) atomicAdd(reinterpret_cast<unsigned long long*>(args.counted), static_cast<unsigned long long>(tokens));
    if (head) return;  // every KV head has the same number of tokens
    const uint32_t staged = args.staged_blocks * block_tokens;
    args.tokens[entry] = static_cast<int32_t>(min(tokens, staged));
    args.places[entry] = tokens <= staged ? static_cast<int32_t>(entry * staged + tokens - 1) : -1;
}

}  // namespace sglang_hybrid::cuda
