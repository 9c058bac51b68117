// Launchers for the beginning of a step, for steps in which whole rows are held, and for the end of such steps.
#include <algorithm>

#include "attend_launch.h"
#include "sglang_hybrid/cuda/attend_pages.cuh"
#include "sglang_hybrid/cuda/begin_step.cuh"
#include "sglang_hybrid/cuda/hold_rows.cuh"
#include "sglang_hybrid/cuda/let_rows_go.cuh"
#include "sglang_hybrid/cuda/move_held.cuh"
#include "slot_launch.h"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

constexpr uint32_t most_rows = 1 << 18;  // each row has a bit in shared memory

uint32_t row_bits(uint32_t rows) { return (rows + 31) / 32 * uint32_t(sizeof(uint32_t)); }

template <class Element, int kDim>
cudaError_t launch_pages(const sh_attend_pages& args, cudaStream_t stream) {
    const AttendPlan plan = plan_attend(kDim, value_bytes<Element>, page_warps<Element>,
                                        EntryShares::bytes(args.step.batch) + PageRows::bytes(args.step.batch));
    if (plan.error) return plan.error;
    const uint64_t blocks = uint64_t{args.step.batch} * args.kv_heads * args.table.max_blocks;
    const uint32_t ctas = std::min(plan.ctas, args.units / 2);
    if (blocks > UINT32_MAX / 2 || ctas == 0 || args.step.batch > most_entries) return cudaErrorInvalidValue;
    const auto kernel = attend_pages<Element, kDim>;
    const uint32_t bytes = plan.shared_bytes;
    if (const auto error = allow_shared(kernel, bytes)) return error;
    if (args.overlaps) return launch_overlapping(kernel, ctas, plan.warps * warp_size, bytes, stream, args);
    kernel<<<ctas, plan.warps * warp_size, bytes, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace

SH_CUDA_API int sh_cuda_begin_step(const sh_begin_step* args, cudaStream_t stream) {
    if (args->batch == 0) return cudaSuccess;
    begin_step<<<args->batch, begin_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_hold_rows(const sh_hold_rows* args, cudaStream_t stream) {
    if (args->table.rows > most_rows || args->kv_heads == 0) return cudaErrorInvalidValue;
    hold_rows<<<1, hold_threads, row_bits(args->table.rows), stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_let_rows_go(const sh_let_rows_go* args, cudaStream_t stream) {
    if (args->rows > most_rows) return cudaErrorInvalidValue;
    let_rows_go<<<1, let_go_threads, row_bits(args->rows), stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_move_held(const sh_move_held* args, cudaStream_t stream) {
    if (args->block_bytes % 16 || args->slots == 0 || args->kv_heads == 0 || args->ctas == 0) return cudaErrorInvalidValue;
    const uint64_t entries = std::min<uint64_t>(args->plan.capacity, args->staged_blocks);
    if (entries == 0) return cudaSuccess;
    return for_slots(args->steps, args->dtype, args->block_bytes, [&]<class Element>() {
        const auto kernel = move_held<Element>;
        kernel<<<uint32_t(std::min<uint64_t>(args->ctas, entries)), copy_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_attend_pages(const sh_attend_pages* args, cudaStream_t stream) {
    if (args->step.batch == 0 || args->kv_heads == 0) return cudaSuccess;
    return for_pools(args->dtype, args->head_dim, args->group,
                     [&](auto element, auto dim) { return launch_pages<decltype(element), dim()>(*args, stream); });
}
