// Allocator of device pages for blocks, while whole rows are held. It runs on the device, because the host does not know whose
// rows a batch has without waiting for the device.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/dense_api.h"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t hold_threads = 512;

struct HoldMemory {
    int32_t free_count;
    uint32_t loads;
};

// Free the pages of a row that is not in the step, or belongs to another request now. Called by a whole warp.
__device__ inline void give_back(const sh_hold_rows& args, HoldMemory& memory, uint32_t row) {
    const uint32_t lane = threadIdx.x % 32;
    const int32_t held = min(args.table.held[row], static_cast<int32_t>(args.table.max_blocks));
    if (held <= 0) return;
    const int32_t first = __shfl_sync(0xFFFFFFFF, lane ? 0 : atomicAdd(&memory.free_count, held), 0);
    for (int32_t i = static_cast<int32_t>(lane); i < held; i += 32) {
        if (static_cast<uint32_t>(first + i) >= args.table.device_pages) continue;
        args.free_pages[first + i] = args.table.pages[uint64_t{row} * args.table.max_blocks + i];
    }
    __syncwarp();
    if (lane == 0) args.table.held[row] = 0;
}

// Allocate pages for the blocks of a row that have none. Return false if too few pages are free. Called by a whole warp.
__device__ inline bool take_pages(const sh_hold_rows& args, HoldMemory& memory, uint32_t entry, uint32_t row, int32_t length) {
    const uint32_t lane = threadIdx.x % 32;
    const int32_t blocks = min((length + 31) / 32, static_cast<int32_t>(args.table.max_blocks));
    const int32_t held = max(args.table.held[row], 0), wanted = blocks - held;
    if (wanted <= 0) return true;
    const int32_t before = __shfl_sync(0xFFFFFFFF, lane ? 0 : atomicAdd(&memory.free_count, -wanted), 0);
    if (before < wanted) {
        if (lane == 0) atomicAdd(&memory.free_count, wanted);
        return false;
    }
    for (int32_t i = static_cast<int32_t>(lane); i < wanted; i += 32) {
        const int32_t page = args.free_pages[before - wanted + i], block = held + i;
        args.table.pages[uint64_t{row} * args.table.max_blocks + block] = page;
        // the newest token is not in the pool yet
        if (block * static_cast<int32_t>(block_tokens) >= length - 1) continue;
        const int32_t from = args.step.page_table[uint64_t{entry} * args.step.max_blocks + block];
        const uint32_t at = atomicAdd(&memory.loads, args.kv_heads);
        for (uint32_t head = 0; head < args.kv_heads && at + head < args.capacity; ++head) {
            args.load_pages[at + head] = from;
            args.load_destinations[at + head] = page * static_cast<int32_t>(args.kv_heads) + static_cast<int32_t>(head);
        }
    }
    __syncwarp();
    if (lane == 0) args.table.held[row] = blocks;
    return true;
}

// One CTA. Which page a block gets depends on which warp comes first; results of attention do not depend on the page.
__global__ void __launch_bounds__(hold_threads) hold_rows(const __grid_constant__ sh_hold_rows args) {
    extern __shared__ uint32_t in_step[];  // a bit for each row
    __shared__ HoldMemory memory;
    const uint32_t rows = args.table.rows, warp = threadIdx.x / 32, warps = hold_threads / 32;
    const uint32_t active = active_of(args.step.active_rows, args.step.batch);
    for (uint32_t i = threadIdx.x; i < (rows + 31) / 32; i += hold_threads) in_step[i] = 0;
    if (threadIdx.x == 0) {
        memory.free_count = min(max(*args.free_count, 0), static_cast<int32_t>(args.table.device_pages));
        memory.loads = 0;
    }
    __syncthreads();
    const auto row_at = [&](uint32_t entry) {  // row 0 is the row of padding, which several entries have
        const int32_t row = args.step.row_of[entry];
        return row > 0 && static_cast<uint32_t>(row) < rows ? row : -1;
    };
    for (uint32_t entry = threadIdx.x; entry < active; entry += hold_threads) {
        const int32_t row = row_at(entry);
        if (row >= 0) atomicOr(&in_step[row / 32], 1u << row % 32);
    }
    __syncthreads();
    for (uint32_t row = warp; row < rows; row += warps) {
        if (!(in_step[row / 32] >> row % 32 & 1) || args.renewed[row]) give_back(args, memory, row);
    }
    __syncthreads();
    for (uint32_t row = threadIdx.x; row < rows; row += hold_threads) args.renewed[row] = 0;
    for (uint32_t entry = warp; entry < active; entry += warps) {
        const int32_t row = row_at(entry), length = args.step.lengths[entry];
        const bool held = row < 0 || take_pages(args, memory, entry, static_cast<uint32_t>(row), length);
        if (!held && threadIdx.x % 32 == 0 && args.refused) {
            atomicAdd(reinterpret_cast<unsigned long long*>(args.refused), 1ull);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *args.free_count = memory.free_count;
        *args.load_count = static_cast<int32_t>(min(memory.loads, args.capacity));
    }
}

}  // namespace sglang_hybrid::cuda
