// Copies of blocks of 16-bit numbers to slots of codes, by a whole CTA.
#pragma once

#include "sglang_hybrid/cuda/copy_block.cuh"
#include "sglang_hybrid/cuda/slot_codes.cuh"

namespace sglang_hybrid::cuda {

// As copy_blocks, from numbers of 16 bits to codes. `bytes`: of the numbers of a block's keys, or of its values. `factors`: of all
// slots; steps(block): of the block's KV head.
template <class Element, class From, class To, class Steps>
__device__ void encode_blocks(const Blocks<const void>& source, uint32_t count, uint32_t bytes, From from,
                              const Blocks<void>& target, To to, uint16_t* factors, Steps steps) {
    using Slots = SlotEight<Element, Element, true>;
    const uint32_t chunks = bytes / sizeof(uint4), row_chunks = chunks / block_tokens;
    auto* const keys = static_cast<uint2*>(target.keys);
    auto* const values = static_cast<uint2*>(target.values);
    read_blocks(source, count, bytes, from, [=](uint32_t block, bool is_value, uint32_t index, const uint4& chunk) {
        const CodeSteps of_head = steps(block);
        const float* const per_step = is_value ? of_head.per_value_step : of_head.per_key_step;
        uint16_t* const factor = factors + to(block) * slot_factors + is_value * block_tokens + index / row_chunks;
        (is_value ? values : keys)[to(block) * chunks + index] = Slots::of_pool(chunk, per_step, {row_chunks}, factor);
    });
}

// Copy blocks to slots: as they are if Element is void, to codes if it is the dtype of the blocks. Called by a whole CTA.
template <class Element, class From, class To, class Steps>
__device__ void copy_to_slots(const Blocks<const void>& source, uint32_t count, uint32_t bytes, From from,
                              const Blocks<void>& target, To to, uint16_t* factors, Steps steps) {
    if constexpr (std::is_void_v<Element>) copy_blocks(source, count, bytes, from, target, to);
    else encode_blocks<Element>(source, count, bytes, from, target, to, factors, steps);
}

}  // namespace sglang_hybrid::cuda
