// Launchers of moving averages and contextual sets.
#include "attend_launch.h"
#include "sglang_hybrid/cuda/contextual_sets.cuh"
#include "sglang_hybrid/cuda/move_averages.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_contextual_sets(const sh_contextual_sets* args, cudaStream_t stream) {
    const uint32_t ctas = args->step.batch * args->kv_heads;
    if (ctas == 0) return cudaSuccess;
    if (args->table.slots == 0) return cudaErrorInvalidValue;
    return for_heads(args->dtype, args->head_dim, args->group, [&](auto element, auto dim) -> cudaError_t {
        const auto kernel = contextual_sets<decltype(element), dim()>;
        const uint32_t bytes = LogitMemory(dim()).bytes;
        if (const auto error = allow_shared(kernel, bytes)) return error;
        kernel<<<ctas, set_threads, bytes, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_move_averages(const sh_move_averages* args, cudaStream_t stream) {
    const uint64_t parts = (uint64_t{args->slots} + average_slots - 1) / average_slots;
    const uint64_t ctas = uint64_t{args->batch} * args->kv_heads * parts;
    if (ctas == 0) return cudaSuccess;
    if (ctas > INT32_MAX) return cudaErrorInvalidValue;
    return for_heads(args->dtype, args->head_dim, args->group, [&](auto element, auto dim) -> cudaError_t {
        const auto kernel = move_averages<decltype(element), dim()>;
        const uint32_t bytes = LogitMemory(dim()).bytes;
        if (const auto error = allow_shared(kernel, bytes)) return error;
        kernel<<<uint32_t(ctas), logit_warps * warp_size, bytes, stream>>>(*args);
        return cudaGetLastError();
    });
}
