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
    auto* const keys = static_cast<uint2*>(target.keys) + to * chunks;
    auto* const values = static_cast<uint2*>(target.values) + to * chunks;
    read_block(source, from, bytes, [=](bool is_value, uint32_t index, const uint4& chunk) {
        const float* const of_channels = is_value ? steps.values : steps.keys;
        (is_value ? values : keys)[index] = Slots::of_pool(chunk, of_channels, index % row_chunks * 8);
    });
}

// Copy a block to a slot: as it is if Element is void, to codes if it is the dtype of the block. Called by a whole CTA.
template <class Element>
__device__ void copy_to_slot(const Blocks<const void>& source, uint64_t from, const Blocks<void>& target, uint64_t to,
                             uint32_t bytes, const CodeSteps& steps) {
    if constexpr (std::is_void_v<Element>) copy_block(source, from, target, to, bytes);
    else encode_block<Element>(source, from, target, to, bytes, steps);
}

}  // namespace sglang_hybrid::cuda
