// Keys that are new in a layer: which tokens of which page a CTA has to encode.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/selection_api.h"

namespace sglang_hybrid::cuda {

// Return the number of blocks of a row; 0 for a length that no row of the step can have.
__device__ inline uint32_t row_blocks(const sh_step& step, uint32_t entry) {
    const int32_t length = step.lengths[entry];
    if (length < 1 || static_cast<uint32_t>(length) > step.max_blocks * block_tokens) return 0;
    return (static_cast<uint32_t>(length) + block_tokens - 1) / block_tokens;
}

// The tokens to encode: the first tokens of a page, or the newest token of a batch entry.
struct NewTokens {
    int32_t page = -1;
    uint32_t first = 0, count = 0;

    __device__ NewTokens(const sh_new_keys& keys, uint32_t index) {
        if (keys.pages) {
            page = keys.pages[index];
            count = static_cast<uint32_t>(min(max(keys.filled[index], 0), static_cast<int32_t>(block_tokens)));
            return;
        }
        const sh_step& step = keys.step;
        if (index >= active_of(step.active_rows, step.batch)) return;
        const uint32_t blocks = row_blocks(step, index);
        if (!blocks) return;
        page = step.page_table[uint64_t{index} * step.max_blocks + blocks - 1];
        first = static_cast<uint32_t>(step.lengths[index] - 1) % block_tokens;
        count = 1;
    }
};

// Return whether each block has a page or an entry of the step. Launchers check this.
inline bool has_tokens(const sh_new_keys& keys) { return keys.pages || keys.count <= keys.step.batch; }

// Return the address of block `index` of a KV head.
template <class Value = uint16_t>
__device__ const Value* block_of(const sh_new_keys& keys, uint32_t index, uint32_t head) {
    return static_cast<const Value*>(keys.keys) + index * keys.page_stride + head * keys.head_stride;
}

}  // namespace sglang_hybrid::cuda
