// LSE of a row's near blocks: sinks, recent blocks and the tail. Merged attention less this is the attention of candidates.
#pragma once

#include "sglang_hybrid/cuda/mean_values.cuh"
#include "sglang_hybrid/cuda/slot_codes.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t most_near_slots = 256;  // as many as selection can handle

struct NearMemory {
    MeanMemory mean;
    int32_t slots[most_near_slots];
    int32_t tokens[most_near_slots];
    uint32_t count;
};

// Return whether a row gets another mean: the number of its earlier tokens is a power of two.
__device__ inline bool is_sampled_again(int32_t length) {
    const int32_t earlier = length - 1;
    return earlier >= int32_t{sh_sampled_again} && !(earlier & (earlier - 1));
}

// List the slots of near blocks, in the order of the slots, so that sums are reproducible. Called by a whole CTA.
__device__ inline void list_near(const sh_near_lse& args, NearMemory& memory, uint64_t first_slot, int32_t length) {
    if (threadIdx.x < 32) {
        const RowBlocks row(length, args.table, args.mean.step.max_blocks);
        uint32_t count = 0;
        for (uint32_t base = 0; base < args.table.slots; base += 32) {
            const uint32_t slot = base + threadIdx.x;
            const int32_t position = slot < args.table.slots ? args.table.positions[first_slot + slot] : -1;
            const bool is_near = position >= 0 && (position < row.first || row.is_near(position));
            const uint32_t found = __ballot_sync(0xFFFFFFFF, is_near);
            const uint32_t place = count + __popc(found & ((1u << threadIdx.x) - 1));
            if (is_near && place < most_near_slots) {
                memory.slots[place] = static_cast<int32_t>(slot);
                memory.tokens[place] = min(length - position * static_cast<int32_t>(block_tokens), int32_t{block_tokens});
            }
            count += __popc(found);
        }
        if (threadIdx.x == 0) memory.count = min(count, most_near_slots);
    }
    __syncthreads();
}

// A CTA for each (batch entry, KV head), a warp for each query head. Lanes side by side have a token, eight channels each.
template <class Element, class Stored, bool kCoded>
__global__ void __launch_bounds__(mean_threads) near_lse(const __grid_constant__ sh_near_lse args) {
    using Slots = SlotEight<Element, Stored, kCoded>;
    __shared__ NearMemory memory;
    const uint32_t heads = args.mean.kv_heads, dim = args.mean.head_dim, row_chunks = dim / 8;
    const uint32_t entry = blockIdx.x / heads, head = blockIdx.x % heads;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = mean_threads / 32;
    if (entry >= active_of(args.mean.step.active_rows, args.mean.step.batch)) return;
    const int32_t row = args.mean.step.row_of[entry];
    float* const result = args.near_lse + uint64_t{blockIdx.x} * args.group;
    if (!row_exists(row, args.table)) {
        for (uint32_t of_group = threadIdx.x; of_group < args.group; of_group += mean_threads) result[of_group] = -INFINITY;
        return;
    }
    const uint64_t owner = uint64_t{static_cast<uint32_t>(row)} * heads + head, first_slot = owner * args.table.slots;
    const int32_t length = args.mean.step.lengths[entry];
    if ((args.mean.only && args.mean.only[entry]) || is_sampled_again(length)) {
        write_mean<Element, Stored>(args.mean, memory.mean, entry, static_cast<uint32_t>(row), head);
    }
    list_near(args, memory, first_slot, length);

    const CodeSteps steps(args.steps, heads, dim, head);
    // a power of two, so that lanes can add up; lanes behind the last channel are idle
    uint32_t of_lanes = 1;
    while (of_lanes < row_chunks) of_lanes *= 2;
    const TokenLanes lanes{of_lanes};
    const uint32_t at_once = 32 / of_lanes, of_token = lane % of_lanes;
    const bool has_channels = of_token < row_chunks;
    for (uint32_t of_group = warp; of_group < args.group; of_group += warps) {
        const uint64_t query_head = uint64_t{blockIdx.x} * args.group + of_group;
        const uint4 asked = has_channels ? static_cast<const uint4*>(args.query)[query_head * row_chunks + of_token] : uint4{};
        const uint32_t words[4] = {asked.x, asked.y, asked.z, asked.w};
        float query[8];
#pragma unroll
        for (uint32_t c = 0; c < 8; ++c) query[c] = widened<Element>(static_cast<uint16_t>(words[c / 2] >> c % 2 * 16));
        float highest = -INFINITY, sum = 0;
        for (uint32_t i = 0; i < memory.count; ++i) {
            const uint64_t slot = first_slot + static_cast<uint32_t>(memory.slots[i]);
            const auto* const keys = static_cast<const typename Slots::Bits*>(args.keys) + slot * block_tokens * row_chunks;
            const uint16_t* const factors = args.factors ? args.factors + slot * slot_factors : nullptr;
            const uint32_t tokens = static_cast<uint32_t>(memory.tokens[i]);
#pragma unroll 4
            for (uint32_t first = 0; first < block_tokens; first += at_once) {
                const uint32_t token = first + lane / of_lanes;
                uint4 key{};
                if (has_channels) key = Slots::widened(keys[token * row_chunks + of_token], steps.keys, lanes, factors + token);
                const uint32_t pairs[4] = {key.x, key.y, key.z, key.w};
                float logit = 0;
#pragma unroll
                for (uint32_t c = 0; c < 8; ++c) {
                    logit += query[c] * widened<Element>(static_cast<uint16_t>(pairs[c / 2] >> c % 2 * 16));
                }
                for (uint32_t step = of_lanes / 2; step; step /= 2) logit += __shfl_xor_sync(0xFFFFFFFF, logit, step);
                if (token >= tokens || !(logit > -INFINITY)) continue;  // the slot may hold anything there
                logit *= args.scale;
                const float raised = fmaxf(highest, logit);
                sum = sum * expf(highest - raised) + expf(logit - raised);
                highest = raised;
            }
        }
        for (uint32_t step = of_lanes; step < 32; step *= 2) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, highest, step), more = __shfl_xor_sync(0xFFFFFFFF, sum, step);
            const float raised = fmaxf(highest, other);
            if (raised > -INFINITY) sum = sum * expf(highest - raised) + more * expf(other - raised);
            highest = raised;
        }
        if (lane) continue;
        result[of_group] = sum > 0 ? highest + logf(sum) + args.near_bias[owner * args.group + of_group] : -INFINITY;
    }
}

}  // namespace sglang_hybrid::cuda
