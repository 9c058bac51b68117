// Converts SGLang's tables to the arrays that the kernels of a step read.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/dense_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t begin_threads = 256;

__device__ inline int64_t number_at(const void* numbers, uint32_t index, bool wide) {
    return wide ? static_cast<const int64_t*>(numbers)[index] : static_cast<const int32_t*>(numbers)[index];
}

// A CTA for each batch entry.
__global__ void __launch_bounds__(begin_threads) begin_step(const __grid_constant__ sh_begin_step args) {
    const uint32_t entry = blockIdx.x;
    const int64_t row = number_at(args.rows, entry, args.wide), length = number_at(args.lengths, entry, args.wide);
    const bool exists = row >= 0 && row < args.rows_known && length > 0 && length <= args.row_tokens;
    const bool is_real = entry < args.active && exists;
    if (threadIdx.x == 0) {
        if (entry == 0) *args.active_rows = static_cast<int32_t>(args.active);
        args.step_lengths[entry] = exists ? static_cast<int32_t>(length) : 0;
        args.row_of[entry] = exists ? static_cast<int32_t>(row) : -1;
        const int32_t first = is_real ? args.first_lengths[row] : 0;
        args.begins[entry] = first == sh_row_arrived || first == sh_row_let_go;
        const int64_t steps = first >= 0 ? length - first + 1 : first == sh_row_let_go ? int64_t{args.whole_steps} + 1 : 1;
        args.whole[entry] = is_real && steps <= int64_t{args.whole_steps} && length > int64_t{args.whole_beyond};
        if (is_real) {
            args.lengths_by_row[row] = static_cast<int32_t>(length);
            if (first < 0) args.first_lengths[row] = static_cast<int32_t>(max(length - steps + 1, int64_t{0}));
        }
    }
    if (!is_real) return;
    const uint32_t blocks = min(static_cast<uint32_t>((length + block_tokens - 1) / block_tokens), args.max_blocks);
    const int32_t* const tokens = args.req_to_token + row * args.row_tokens;
    for (uint32_t i = threadIdx.x; i < blocks; i += begin_threads) {
        args.page_table[uint64_t{entry} * args.max_blocks + i] = tokens[i * block_tokens] / static_cast<int32_t>(block_tokens);
    }
}

}  // namespace sglang_hybrid::cuda
