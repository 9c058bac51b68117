// Marks which rows continue when whole rows are no longer held; all others have no resident block from then on.
#pragma once

#include "sglang_hybrid/cuda/dense_api.h"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t let_go_threads = 512;

// One CTA.
__global__ void __launch_bounds__(let_go_threads) let_rows_go(const __grid_constant__ sh_let_rows_go args) {
    extern __shared__ uint32_t going_on[];  // a bit for each row
    const uint32_t active = active_of(args.step.active_rows, args.step.batch);
    for (uint32_t i = threadIdx.x; i < (args.rows + 31) / 32; i += let_go_threads) going_on[i] = 0;
    __syncthreads();
    for (uint32_t entry = threadIdx.x; args.kept_lengths && entry < args.step.batch; entry += let_go_threads) {
        const int32_t row = entry < active ? args.step.row_of[entry] : -1;
        const bool exists = row >= 0 && static_cast<uint32_t>(row) < args.rows;
        // the kept query must be that of the token before, also if the row was not in all steps
        const bool goes_on = exists && args.kept_lengths[row] > 0 && args.kept_lengths[row] == args.step.lengths[entry] - 1;
        args.goes_on[entry] = goes_on;
        if (goes_on) atomicOr(&going_on[row / 32], 1u << row % 32);
    }
    __syncthreads();
    for (uint32_t row = threadIdx.x; row < args.rows; row += let_go_threads) {
        if (going_on[row / 32] >> row % 32 & 1) continue;
        const int32_t first = args.first_lengths[row];
        const bool decoded = first == sh_row_let_go || (first >= 0 && first < args.lengths_by_row[row]);
        args.first_lengths[row] = decoded ? sh_row_let_go : sh_row_arrived;
    }
}

}  // namespace sglang_hybrid::cuda
