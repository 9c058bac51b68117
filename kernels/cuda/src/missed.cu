// Misses that the worker did not compute: launchers.
#include "attend_launch.h"
#include "sglang_hybrid/cuda/attend_missed.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

template <class Kernel, class Arguments>
cudaError_t launch_missed(Kernel kernel, const Arguments& args, const sh_attend_missed& missed, cudaStream_t stream) {
    const AttendPlan plan = plan_attend(missed.head_dim);
    if (plan.error) return plan.error;
    if (const auto error = allow_shared(kernel, plan.shared_bytes)) return error;
    const uint32_t ctas = std::min(missed.batch * missed.kv_heads, plan.processors);
    kernel<<<ctas, plan.warps * warp_size, plan.shared_bytes, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace

SH_CUDA_API int sh_cuda_attend_missed(const sh_attend_missed* args, cudaStream_t stream) {
    if (args->batch == 0 || args->kv_heads == 0) return cudaSuccess;
    return for_heads(args->dtype, args->head_dim, args->group, [&](auto element, auto dim) {
        return launch_missed(attend_missed<decltype(element), dim()>, *args, *args, stream);
    });
}

SH_CUDA_API int sh_cuda_finish_late(const sh_finish_late* args, cudaStream_t stream) {
    const sh_attend_missed& missed = args->missed;
    if (missed.batch == 0 || missed.kv_heads == 0) return cudaSuccess;
    return for_heads(missed.dtype, missed.head_dim, missed.group, [&](auto element, auto dim) {
        return launch_missed(finish_late<decltype(element), dim()>, *args, missed, stream);
    });
}
