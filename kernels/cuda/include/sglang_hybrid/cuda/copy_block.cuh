// Copies of blocks' keys and values by a whole CTA.
#pragma once

#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t copy_threads = 256;
inline constexpr uint32_t copy_loads = 4;  // of one thread in one part of a block

// Memory of many blocks: their keys one after the other, and their values.
template <class Memory>
struct Blocks {
    Memory* keys;
    Memory* values;
};

// What a thread loads of one part of a block: 16 bytes from each of `copy_loads` places, copy_threads apart.
struct BlockPart {
    uint4 chunks[copy_loads];
};

// Place of a thread's chunk `i` in part `part` of a block: the keys' chunks come first, then those of the values.
__device__ inline uint32_t chunk_of(uint32_t part, uint32_t i) { return (part * copy_loads + i) * copy_threads + threadIdx.x; }

// Load part `part` of block `from`. `chunks`: of the block's keys, or of its values.
__device__ inline BlockPart load_part(const Blocks<const void>& source, uint64_t from, uint32_t chunks, uint32_t part) {
    const auto* const keys = static_cast<const uint4*>(source.keys) + from * chunks;
    const auto* const values = static_cast<const uint4*>(source.values) + from * chunks;
    BlockPart loaded;
#pragma unroll
    for (uint32_t i = 0; i < copy_loads; ++i) {
        const uint32_t chunk = chunk_of(part, i);
        if (chunk < 2 * chunks) loaded.chunks[i] = load_once(chunk < chunks ? keys + chunk : values + (chunk - chunks));
    }
    return loaded;
}

// Read `count` blocks of `source`, and call store(block, is_value, index, chunk) for each 16 bytes of their keys and values. The
// loads of a part are in flight while the part before is stored: a chunk from host memory takes as long as storing thousands.
// from(block): the block's number in `source`, for block 0 to count - 1. Nothing may write the blocks while the kernel runs.
// `bytes`: of a block's keys, or of its values; a multiple of 16. Called by a whole CTA.
template <class From, class Store>
__device__ void read_blocks(const Blocks<const void>& source, uint32_t count, uint32_t bytes, From from, Store store) {
    if (count == 0) return;
    const uint32_t chunks = bytes / sizeof(uint4),
                   parts = (2 * chunks + copy_loads * copy_threads - 1) / (copy_loads * copy_threads);
    BlockPart next = load_part(source, from(0), chunks, 0);
    for (uint32_t block = 0; block < count; ++block) {
        for (uint32_t part = 0; part < parts; ++part) {
            const BlockPart loaded = next;
            if (part + 1 < parts) next = load_part(source, from(block), chunks, part + 1);
            else if (block + 1 < count) next = load_part(source, from(block + 1), chunks, 0);
#pragma unroll
            for (uint32_t i = 0; i < copy_loads; ++i) {
                const uint32_t chunk = chunk_of(part, i);
                const bool is_value = chunk >= chunks;
                if (chunk < 2 * chunks) store(block, is_value, is_value ? chunk - chunks : chunk, loaded.chunks[i]);
            }
        }
    }
}

// Copy blocks of `source` to blocks to(block) of `target`, as read_blocks.
template <class From, class To>
__device__ void copy_blocks(const Blocks<const void>& source, uint32_t count, uint32_t bytes, From from,
                            const Blocks<void>& target, To to) {
    auto* const keys = static_cast<uint4*>(target.keys);
    auto* const values = static_cast<uint4*>(target.values);
    const uint64_t chunks = bytes / sizeof(uint4);
    read_blocks(source, count, bytes, from, [=](uint32_t block, bool is_value, uint32_t index, const uint4& chunk) {
        (is_value ? values : keys)[to(block) * chunks + index] = chunk;
    });
}

}  // namespace sglang_hybrid::cuda
