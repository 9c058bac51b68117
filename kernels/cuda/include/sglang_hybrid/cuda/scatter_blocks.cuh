// Copies of blocks from device memory to registered host memory. The GPU itself writes over PCIe.
//
// Writes are posted, so fewer CTAs than for gathering fill the link. The copy engine is better where blocks lie side by
// side (sh_copy_runs): it takes no registers or shared memory from the kernels that run beside.
#pragma once

#include "sglang_hybrid/cuda/prefill_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t scatter_threads = 256;
inline constexpr uint32_t scatter_loads = 4;  // of one thread before it stores the first

__device__ inline void write_entry(const sh_scatter_blocks& list, uint64_t slot, uint64_t block) {
    const uint32_t chunks = list.block_bytes / sizeof(uint4);
    const auto* const key_slot = static_cast<const uint4*>(list.key_slots) + slot * chunks;
    const auto* const value_slot = static_cast<const uint4*>(list.value_slots) + slot * chunks;
    auto* const keys = static_cast<uint4*>(list.keys) + block * chunks;
    auto* const values = static_cast<uint4*>(list.values) + block * chunks;
    for (uint32_t first = threadIdx.x; first < 2 * chunks; first += scatter_loads * scatter_threads) {
        uint4 loaded[scatter_loads];
#pragma unroll
        for (uint32_t i = 0; i < scatter_loads; ++i) {
            const uint32_t chunk = first + i * scatter_threads;
            if (chunk < 2 * chunks) loaded[i] = chunk < chunks ? key_slot[chunk] : value_slot[chunk - chunks];
        }
#pragma unroll
        for (uint32_t i = 0; i < scatter_loads; ++i) {
            const uint32_t chunk = first + i * scatter_threads;
            if (chunk < 2 * chunks) (chunk < chunks ? keys + chunk : values + (chunk - chunks))[0] = loaded[i];
        }
    }
}

__global__ void __launch_bounds__(scatter_threads) scatter_blocks(const __grid_constant__ sh_scatter_blocks list) {
    for (uint32_t entry = blockIdx.x; entry < list.capacity; entry += gridDim.x) {
        const int32_t page = list.pages[entry];
        if (page >= 0 && static_cast<uint32_t>(page) < list.pool_pages) {
            const uint64_t head = entry / list.slots % list.kv_heads;
            write_entry(list, entry, static_cast<uint64_t>(page) * list.kv_heads + head);
        } else if (page != -1 && threadIdx.x == 0 && list.refused) {
            atomicAdd(reinterpret_cast<unsigned long long*>(list.refused), 1ull);
        }
    }
}

}  // namespace sglang_hybrid::cuda
