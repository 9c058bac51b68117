// Plans, which are lists of blocks that get slots: the choice of the slots to overwrite, and the update of the slot table.
#pragma once

#include "sglang_hybrid/cuda/selection_memory.cuh"

namespace sglang_hybrid::cuda {

// Write the slots that may be overwritten to memory.free_slots, in the order in which to overwrite them, and return their
// number. Empty slots come first, then those of candidates that are not `kept` and have a score below `limit`, lowest score
// first. Called by a whole CTA.
__device__ inline uint32_t find_free_slots(SelectionMemory& memory, const sh_slot_table& table, const RowBlocks& row,
                                           const PositionSet& kept, const float* scores, float limit) {
    const uint32_t slot = threadIdx.x;
    bool is_free = slot >= table.sink && slot < table.slots;
    float score = -INFINITY;
    if (is_free) {
        const int32_t held = memory.slots[slot];
        is_free = !row.is_near(held);
        if (row.is_candidate(held)) {
            score = or_lowest(scores[held]);
            is_free = !kept.has(held) && score < limit;
        }
    }
    const uint32_t turn = place_by_score<true>(memory, is_free, score, table.slots);
    if (is_free) memory.free_slots[turn] = static_cast<int32_t>(slot);
    return static_cast<uint32_t>(__syncthreads_count(is_free));
}

// Add the entries of all threads with `is_in` to a plan, each with the slot that it goes to. Called by a whole CTA.
__device__ inline void add_to_plan(const sh_plan& plan, SelectionMemory& memory, bool is_in, const Entry& entry,
                                   uint64_t destination) {
    uint32_t added;
    const uint32_t place = sum_before(is_in, memory.select, added);
    if (threadIdx.x == 0) memory.plan_first = added ? atomicAdd(&plan.progress[0], added) : 0;
    __syncthreads();
    const uint64_t at = uint64_t{memory.plan_first} + place;
    if (!is_in || at >= plan.capacity) return;
    plan.pages[at] = entry.page;
    plan.positions[at] = entry.position;
    plan.destinations[at] = static_cast<int32_t>(destination);
}

// Count a CTA as done with the plan. The last CTA writes the plan's number of entries and returns it; all others return 0.
// Called by one thread of each CTA, after the CTA has written its entries.
__device__ inline uint32_t finish_plan(const sh_plan& plan) {
    __threadfence();
    if (atomicAdd(&plan.progress[1], 1u) != gridDim.x - 1) return 0;
    const uint32_t entries = atomicExch(&plan.progress[0], 0u);
    *plan.count = static_cast<int32_t>(entries);
    plan.progress[1] = 0;
    return entries;
}

// Write the new positions of slots to the slot table, after the blocks of a plan were copied.
__global__ void __launch_bounds__(select_threads) apply_plan(const __grid_constant__ sh_apply_plan args) {
    const int32_t count = *args.plan.count;
    const uint64_t entries = count < 0 ? 0 : min(static_cast<uint64_t>(count), args.plan.capacity);
    const uint64_t step = uint64_t{gridDim.x} * select_threads;
    for (uint64_t i = uint64_t{blockIdx.x} * select_threads + threadIdx.x; i < entries; i += step) {
        const int32_t slot = args.plan.destinations[i];
        if (slot >= 0 && static_cast<uint64_t>(slot) < args.slots) args.positions[slot] = args.plan.positions[i];
    }
}

}  // namespace sglang_hybrid::cuda
