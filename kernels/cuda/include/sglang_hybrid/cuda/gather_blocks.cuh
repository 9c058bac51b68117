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

// Lists may be mostly empty: a CTA looks at as many entries as it has threads at once, every gridDim-th of the list, and
// then copies those that are there.
__global__ void __launch_bounds__(gather_threads) gather_blocks(const __grid_constant__ sh_gather_blocks list) {
    __shared__ uint32_t found_pages[gather_threads];
    __shared__ uint64_t found_slots[gather_threads];
    __shared__ uint32_t found;
    const uint32_t entries = entries_of(list);
    for (uint64_t first = blockIdx.x; first < entries; first += uint64_t{gather_threads} * gridDim.x) {
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        const uint64_t entry = first + uint64_t{threadIdx.x} * gridDim.x;
        const int32_t page = entry < entries ? list.pages[entry] : -1;
        if (page != -1) {
            const int64_t slot = list.destinations ? int64_t{list.destinations[entry]} : static_cast<int64_t>(entry);
            const bool in_bounds = page >= 0 && static_cast<uint32_t>(page) < list.pool_pages && slot >= 0 &&
                                   static_cast<uint64_t>(slot) < list.destination_slots;
            if (in_bounds) {
                const uint32_t place = atomicAdd(&found, 1u);
                found_pages[place] = static_cast<uint32_t>(page);
                found_slots[place] = static_cast<uint64_t>(slot);
            } else if (list.refused) {
                atomicAdd(reinterpret_cast<unsigned long long*>(list.refused), 1ull);
            }
        }
        __syncthreads();
        for (uint32_t i = 0; i < found; ++i) {
            const uint64_t head = found_slots[i] / list.slots % list.kv_heads;
            copy_entry(list, uint64_t{found_pages[i]} * list.kv_heads + head, found_slots[i]);
        }
        __syncthreads();  // before others overwrite what this one still reads
    }
}

}  // namespace sglang_hybrid::cuda
