// Which slot a row's new tail takes: `admit` of the reference's resident set. The rule is in selection_api.h.
#pragma once

#include <cfloat>

#include "sglang_hybrid/cuda/selection_api.h"

namespace sglang_hybrid::cuda {

// A row's blocks by position: sinks [0, first), candidates of selection [first, last), recent blocks and the tail behind.
struct RowBlocks {
    int32_t count, first, last;

    __device__ RowBlocks(int32_t length, const sh_slot_table& table, uint32_t max_blocks) {
        count = min((max(length, 0) + 31) / 32, static_cast<int32_t>(max_blocks));
        first = min(static_cast<int32_t>(table.sink), count);
        last = max(first, count - 1 - static_cast<int32_t>(table.recent));
    }
    __device__ int32_t tail() const { return count - 1; }
    __device__ bool is_near(int32_t position) const { return position >= last && position < count; }
    __device__ bool is_candidate(int32_t position) const { return position >= first && position < last; }
};

__device__ inline bool row_exists(int32_t row, const sh_slot_table& table) {
    return row >= 0 && static_cast<uint32_t>(row) < table.rows;
}

// Return the slot that holds a block, -1 if none does. `positions`: those of one (row, KV head). Called by a whole warp.
__device__ inline int32_t find_slot(const int32_t* positions, const sh_slot_table& table, int32_t position) {
    for (uint32_t base = 0; base < table.slots; base += 32) {
        const uint32_t slot = base + threadIdx.x % 32;
        const uint32_t found = __ballot_sync(0xFFFFFFFF, slot < table.slots && positions[slot] == position);
        if (found) return static_cast<int32_t>(base + __ffs(found) - 1);
    }
    return -1;
}

// Return the slot for a tail that has none: an empty slot, else that of the resident block with the lowest score; -1 if near
// blocks (recent blocks and the tail) have all slots. `scores`: those of the row's blocks; null: any resident block gives up
// its slot. Called by a whole warp.
__device__ inline int32_t slot_for_tail(const int32_t* positions, const sh_slot_table& table, const RowBlocks& row,
                                        const float* scores) {
    const int32_t tail = row.tail();
    if (tail < static_cast<int32_t>(table.sink)) return tail < static_cast<int32_t>(table.slots) ? tail : -1;
    const int32_t leaving = tail - 1 - static_cast<int32_t>(table.recent);  // recent until now
    float lowest = INFINITY;
    int32_t chosen = -1;
    for (uint32_t slot = table.sink + threadIdx.x % 32; slot < table.slots; slot += 32) {
        const int32_t position = positions[slot];
        float value = -INFINITY;  // empty, or the slot of a block that the row no longer has
        if (row.is_near(position)) continue;
        if (row.is_candidate(position)) {
            // the block that was recent until now stays, unless there are slots for near blocks only
            value = position == leaving ? FLT_MAX : scores ? fminf(scores[position], FLT_MAX / 2) : 0.0f;
        }
        if (chosen < 0 || value < lowest) lowest = value, chosen = static_cast<int32_t>(slot);
    }
#pragma unroll
    for (uint32_t step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFF, lowest, step);
        const int32_t slot = __shfl_xor_sync(0xFFFFFFFF, chosen, step);
        const bool better = slot >= 0 && (chosen < 0 || other < lowest || (other == lowest && slot < chosen));
        if (better) lowest = other, chosen = slot;
    }
    return chosen;
}

}  // namespace sglang_hybrid::cuda
