// Copy of one block of 16-bit numbers to a slot of codes, by a whole CTA.
#pragma once

#include "sglang_hybrid/cuda/copy_block.cuh"
#include "sglang_hybrid/cuda/slot_codes.cuh"

namespace sglang_hybrid::cuda {

// As copy_block, from numbers of 16 bits to codes. `bytes`: of the numbers of a block's keys, or of its values.
template <class Element>
__device__ void encode_block(const Blocks<const void>& source, uint64_t from, const Blocks<void>& target, uint64_t to,
                             uint32_t bytes, const CodeSteps& steps) {
    using Slots = SlotEight<Element, Element, true>;
    const uint32_t chunks = bytes / sizeof(uint4), row_chunks = chunks / block_tokens;
    const auto* const keys = static_cast<const uint4*>(source.keys) + from * chunks;
    const auto* const values = static_cast<const uint4*>(source.values) + from * chunks;
    auto* const key_target = static_cast<uint2*>(target.keys) + to * chunks;
    auto* const value_target = static_cast<uint2*>(target.values) + to * chunks;
    for (uint32_t first = threadIdx.x; first < 2 * chunks; first += copy_loads * copy_threads) {
        uint4 loaded[copy_loads];
#pragma unroll
        for (uint32_t i = 0; i < copy_loads; ++i) {
            const uint32_t chunk = first + i * copy_threads;
            if (chunk < 2 * chunks) loaded[i] = load_once(chunk < chunks ? keys + chunk : values + (chunk - chunks));
        }
#pragma unroll
        for (uint32_t i = 0; i < copy_loads; ++i) {
            const uint32_t chunk = first + i * copy_threads, channel = chunk % row_chunks * 8;
            if (chunk >= 2 * chunks) continue;
            if (chunk < chunks) key_target[chunk] = Slots::of_pool(loaded[i], steps.keys, channel);
            else value_target[chunk - chunks] = Slots::of_pool(loaded[i], steps.values, channel);
        }
    }
}

// Copy a block to a slot: as it is if Element is void, to codes if it is the dtype of the block. Called by a whole CTA.
template <class Element>
__device__ void copy_to_slot(const Blocks<const void>& source, uint64_t from, const Blocks<void>& target, uint64_t to,
                             uint32_t bytes, const CodeSteps& steps) {
    if constexpr (std::is_void_v<Element>) copy_block(source, from, target, to, bytes);
    else encode_block<Element>(source, from, target, to, bytes, steps);
}

}  // namespace sglang_hybrid::cuda
