// Moves blocks of rows that were held as a whole from pages to the slots that a plan gives them. Pages and slots are the same
// memory: a first launch copies the blocks that it finds in pages to a staging, and only a second launch writes slots.
#pragma once

#include "sglang_hybrid/cuda/dense_api.h"
#include "sglang_hybrid/cuda/encode_block.cuh"

namespace sglang_hybrid::cuda {

// Return the number of the block in the pages that an entry of a plan has; -1: its row, or that block of it, is not held.
__device__ inline int64_t held_block(const sh_move_held& args, uint64_t slot, int32_t position) {
    const uint64_t owner = slot / args.slots, row = owner / args.kv_heads, head = owner % args.kv_heads;
    // a row that belongs to another request now still holds the blocks of the request before
    if (row >= args.table.rows || args.renewed[row]) return -1;
    if (position < 0 || position >= args.table.held[row] || static_cast<uint32_t>(position) >= args.table.max_blocks) return -1;
    const int32_t page = args.table.pages[row * args.table.max_blocks + static_cast<uint32_t>(position)];
    if (page < 0 || static_cast<uint32_t>(page) >= args.table.device_pages) return -1;
    return static_cast<int64_t>(uint64_t{static_cast<uint32_t>(page)} * args.kv_heads + head);
}

// CTAs take entries in turn. A staged entry has page -1 from then on, so that it is not gathered from the host pool. Element:
// as for copy_to_slots.
template <class Element>
__global__ void __launch_bounds__(copy_threads) move_held(const __grid_constant__ sh_move_held args) {
    const int32_t count = *args.plan.count;
    const uint64_t listed = count < 0 ? 0 : min(static_cast<uint64_t>(count), args.plan.capacity);
    const uint64_t entries = min(listed, uint64_t{args.staged_blocks});
    for (uint64_t i = blockIdx.x; i < entries; i += gridDim.x) {
        const int32_t slot = args.plan.destinations[i];
        if (slot < 0 || static_cast<uint64_t>(slot) >= args.slot_blocks) continue;
        if (args.to_slots) {
            if (args.plan.pages[i] != -1) continue;
            const uint32_t head = static_cast<uint32_t>(slot) / args.slots % args.kv_heads;
            const uint32_t head_dim = args.block_bytes / (block_tokens * sizeof(uint16_t));  // with steps
            copy_to_slots<Element>(
                {args.staged_keys, args.staged_values}, 1, args.block_bytes, [&](uint32_t) { return i; },
                {args.keys, args.values}, [&](uint32_t) { return static_cast<uint64_t>(slot); }, args.factors,
                [&](uint32_t) { return CodeSteps(args.steps, args.kv_heads, head_dim, head); });
        } else {
            const int64_t from = held_block(args, static_cast<uint64_t>(slot), args.plan.positions[i]);
            if (from < 0) continue;
            copy_blocks(
                {args.keys, args.values}, 1, args.block_bytes, [&](uint32_t) { return static_cast<uint64_t>(from); },
                {args.staged_keys, args.staged_values}, [&](uint32_t) { return i; });
            if (threadIdx.x == 0) args.plan.pages[i] = -1;
        }
    }
}

}  // namespace sglang_hybrid::cuda
