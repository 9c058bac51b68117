// Launcher of attention over blocks in the host pool.
#include "attend_launch.h"
#include "sglang_hybrid/cuda/finish_late.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_finish_late(const sh_finish_late* args, cudaStream_t stream) {
    if (args->step.batch == 0 || args->kv_heads == 0) return cudaSuccess;
    return for_pools(args->dtype, args->head_dim, args->group, [&](auto element, auto dim) -> cudaError_t {
        constexpr uint32_t of_value = value_bytes<decltype(element)>;
        const AttendPlan plan = plan_attend(args->head_dim, of_value, attend_warps, EntryShares::bytes(args->step.batch));
        if (plan.error) return plan.error;
        const uint64_t longest = std::max(args->step.max_blocks, args->most_blocks);
        const uint64_t blocks = uint64_t{args->step.batch} * args->kv_heads * longest;
        // one CTA of a processor has enough loads in flight for PCIe; with fewer CTAs, a launch without work ends sooner
        const uint32_t ctas = std::min(plan.processors, args->units / 2);
        if (blocks > UINT32_MAX / 2 || ctas == 0 || args->step.batch > most_entries) return cudaErrorInvalidValue;
        const auto kernel = finish_late<decltype(element), dim()>;
        if (const auto error = allow_shared(kernel, plan.shared_bytes)) return error;
        kernel<<<ctas, plan.warps * warp_size, plan.shared_bytes, stream>>>(*args);
        return cudaGetLastError();
    });
}
