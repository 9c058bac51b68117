// Attention over blocks in the host pool: launcher.
#include "attend_launch.h"
#include "sglang_hybrid/cuda/finish_late.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_finish_late(const sh_finish_late* args, cudaStream_t stream) {
    if (args->batch == 0 || args->kv_heads == 0) return cudaSuccess;
    return for_heads(args->dtype, args->head_dim, args->group, [&](auto element, auto dim) -> cudaError_t {
        const AttendPlan plan = plan_attend(args->head_dim);
        if (plan.error) return plan.error;
        const auto kernel = finish_late<decltype(element), dim()>;
        if (const auto error = allow_shared(kernel, plan.shared_bytes)) return error;
        const uint32_t ctas = std::min(args->batch * args->kv_heads, plan.processors);
        kernel<<<ctas, plan.warps * warp_size, plan.shared_bytes, stream>>>(*args);
        return cudaGetLastError();
    });
}
