// Copies of blocks from registered host memory to slots in device memory. The GPU itself reads over PCIe.
//
// A copy engine needs a command for every block, which costs more than a block of 8 KiB. Here a few CTAs keep enough
// loads in flight to fill the link: one entry (keys and values) per CTA and turn, up to eight loads of 16 bytes per thread.
#pragma once

#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/encode_block.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t gather_threads = copy_threads;

__device__ inline uint32_t entries_of(const sh_gather_blocks& list) {
    if (!list.count) return list.capacity;
    const int64_t entries = static_cast<int64_t>(*list.count) * list.per_count;
    return entries < 0 ? 0 : static_cast<uint32_t>(min(entries, static_cast<int64_t>(list.capacity)));
}

// Lists may be mostly empty: a CTA checks as many entries at once as it has threads, every gridDim-th entry of the list, and
// then copies the blocks of those that have a page. Element: as for copy_to_slots.
template <class Element>
__global__ void __launch_bounds__(gather_threads) gather_blocks(const __grid_constant__ sh_gather_blocks list) {
    __shared__ uint32_t found_pages[gather_threads];
    __shared__ uint64_t found_slots[gather_threads];
    __shared__ uint32_t found;
    const uint64_t start = list.taken_ns ? now_ns() : 0;
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
        const uint32_t head_dim = list.block_bytes / (block_tokens * sizeof(uint16_t));  // with steps
        const auto head = [&](uint32_t i) { return static_cast<uint32_t>(found_slots[i] / list.slots % list.kv_heads); };
        copy_to_slots<Element>(
            {list.keys, list.values}, found, list.block_bytes,
            [&](uint32_t i) { return uint64_t{found_pages[i]} * list.kv_heads + head(i); }, {list.key_slots, list.value_slots},
            [&](uint32_t i) { return found_slots[i]; }, list.factors,
            [&](uint32_t i) { return CodeSteps(list.steps, list.kv_heads, head_dim, head(i)); });
        __syncthreads();  // before other threads overwrite what this one still reads
    }
    if (threadIdx.x == 0 && list.taken_ns)
        atomicAdd(reinterpret_cast<unsigned long long*>(list.taken_ns), (now_ns() - start) / gridDim.x);
}

}  // namespace sglang_hybrid::cuda
