// Blocks from registered host memory to slots in device memory, read by the GPU itself over PCIe.
//
// A copy engine needs a command for every block, which costs more than a block of 8 KiB. Here a few CTAs keep enough
// loads on their way to fill the link: one entry (keys and values) per CTA and turn, four loads of 16 bytes per thread.
#pragma once

#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t gather_threads = 256;
inline constexpr uint32_t gather_loads = 4;  // of one thread, before it stores the first

__device__ inline uint32_t entries_of(const sh_gather_blocks& list) {
    if (!list.count) return list.capacity;
    const int64_t entries = static_cast<int64_t>(*list.count) * list.per_count;
    return entries < 0 ? 0 : static_cast<uint32_t>(min(entries, static_cast<int64_t>(list.capacity)));
}

__device__ inline void copy_entry(const sh_gather_blocks& list, uint64_t block, uint64_t slot) {
    const uint32_t chunks = list.block_bytes / sizeof(uint4);
    const auto* const keys = static_cast<const uint4*>(list.keys) + block * chunks;
    const auto* const values = static_cast<const uint4*>(list.values) + block * chunks;
    auto* const key_slot = static_cast<uint4*>(list.key_slots) + slot * chunks;
    auto* const value_slot = static_cast<uint4*>(list.value_slots) + slot * chunks;
    for (uint32_t first = threadIdx.x; first < 2 * chunks; first += gather_loads * gather_threads) {
        uint4 loaded[gather_loads];
#pragma unroll
        for (uint32_t i = 0; i < gather_loads; ++i) {
            const uint32_t chunk = first + i * gather_threads;
            if (chunk < 2 * chunks) loaded[i] = load_once(chunk < chunks ? keys + chunk : values + (chunk - chunks));
        }
#pragma unroll
        for (uint32_t i = 0; i < gather_loads; ++i) {
            const uint32_t chunk = first + i * gather_threads;
            if (chunk < 2 * chunks) (chunk < chunks ? key_slot + chunk : value_slot + (chunk - chunks))[0] = loaded[i];
        }
    }
}

__global__ void __launch_bounds__(gather_threads) gather_blocks(const __grid_constant__ sh_gather_blocks list) {
    const uint32_t entries = entries_of(list);
    const auto page_of = [&](uint32_t entry) { return entry < entries ? list.pages[entry] : -1; };
    const auto slot_of = [&](uint32_t entry) {
        if (!list.destinations) return static_cast<int64_t>(entry);
        return entry < entries ? static_cast<int64_t>(list.destinations[entry]) : int64_t{-1};
    };
    int32_t page = page_of(blockIdx.x);
    int64_t slot = slot_of(blockIdx.x);
    for (uint32_t entry = blockIdx.x; entry < entries; entry += gridDim.x) {
        // of the next turn: its latency hides behind the copies of this one
        const int32_t next_page = page_of(entry + gridDim.x);
        const int64_t next_slot = slot_of(entry + gridDim.x);
        const bool in_bounds = page >= 0 && static_cast<uint32_t>(page) < list.pool_pages && slot >= 0 &&
                               static_cast<uint64_t>(slot) < list.destination_slots;
        if (in_bounds) {
            const uint64_t head = static_cast<uint64_t>(slot) / list.slots % list.kv_heads;
            copy_entry(list, static_cast<uint64_t>(page) * list.kv_heads + head, static_cast<uint64_t>(slot));
        } else if (page != -1 && threadIdx.x == 0 && list.refused) {
            atomicAdd(reinterpret_cast<unsigned long long*>(list.refused), 1ull);
        }
        page = next_page;
        slot = next_slot;
    }
}

}  // namespace sglang_hybrid::cuda
