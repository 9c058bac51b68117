// Copy of one block's keys and values by a whole CTA.
#pragma once

#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t copy_threads = 256;
inline constexpr uint32_t copy_loads = 4;  // of one thread before it stores the first

// Memory of many blocks: their keys one after the other, and their values.
template <class Memory>
struct Blocks {
    Memory* keys;
    Memory* values;
};

// Read block `from` of `source`, and call store(is_value, index, chunk) for each 16 bytes of its keys and of its values. Nothing
// may write the block while the kernel runs. `bytes`: of a block's keys, or of its values; a multiple of 16. Called by a whole
// CTA.
template <class Store>
__device__ void read_block(const Blocks<const void>& source, uint64_t from, uint32_t bytes, Store store) {
    const uint32_t chunks = bytes / sizeof(uint4);
    const auto* const keys = static_cast<const uint4*>(source.keys) + from * chunks;
    const auto* const values = static_cast<const uint4*>(source.values) + from * chunks;
    for (uint32_t first = threadIdx.x; first < 2 * chunks; first += copy_loads * copy_threads) {
        uint4 loaded[copy_loads];
#pragma unroll
        for (uint32_t i = 0; i < copy_loads; ++i) {
            const uint32_t chunk = first + i * copy_threads;
            if (chunk < 2 * chunks) loaded[i] = load_once(chunk < chunks ? keys + chunk : values + (chunk - chunks));
        }
#pragma unroll
        for (uint32_t i = 0; i < copy_loads; ++i) {
            const uint32_t chunk = first + i * copy_threads;
            const bool is_value = chunk >= chunks;
            if (chunk < 2 * chunks) store(is_value, is_value ? chunk - chunks : chunk, loaded[i]);
        }
    }
}

// Copy block `from` of `source` to block `to` of `target`, as read_block.
__device__ inline void copy_block(const Blocks<const void>& source, uint64_t from, const Blocks<void>& target, uint64_t to,
                                  uint32_t bytes) {
    const uint64_t first = to * (bytes / sizeof(uint4));
    auto* const keys = static_cast<uint4*>(target.keys) + first;
    auto* const values = static_cast<uint4*>(target.values) + first;
    read_block(source, from, bytes,
               [=](bool is_value, uint32_t index, const uint4& chunk) { (is_value ? values : keys)[index] = chunk; });
}

}  // namespace sglang_hybrid::cuda
