// Launchers of what stands for blocks that are left out.
#include <type_traits>

#include "sglang_hybrid/cuda/near_lse.cuh"
#include "stored_launch.h"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

// Call use(Element{}, Stored{}), the dtypes of model and pool. Lanes of a warp share a token's channels, eight each.
template <class Use>
cudaError_t for_values(const sh_mean_values& args, Use use) {
    if (args.head_dim % 8 || args.head_dim < 8 || args.head_dim > max_head_dim) return cudaErrorInvalidValue;
    return for_stored(args.dtype, use);
}

}  // namespace

SH_CUDA_API int sh_cuda_mean_values(const sh_mean_values* args, cudaStream_t stream) {
    return for_values(*args, [&](auto element, auto stored) -> cudaError_t {
        const uint32_t ctas = args->step.batch * args->kv_heads;
        if (ctas == 0) return cudaSuccess;
        const auto kernel = mean_values<decltype(element), decltype(stored)>;
        kernel<<<ctas, mean_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_near_lse(const sh_near_lse* args, cudaStream_t stream) {
    return for_values(args->mean, [&](auto element, auto stored) -> cudaError_t {
        using Element = decltype(element);
        using Stored = decltype(stored);
        const uint32_t ctas = args->mean.step.batch * args->mean.kv_heads;
        if (args->mean.rows != args->table.rows) return cudaErrorInvalidValue;
        if (ctas == 0) return cudaSuccess;
        if (args->steps) {
            if (!std::is_same_v<Element, Stored>) return cudaErrorInvalidValue;  // codes are of 16-bit numbers
            const auto of_codes = near_lse<Element, Element, true>;
            of_codes<<<ctas, mean_threads, 0, stream>>>(*args);
            return cudaGetLastError();
        }
        const auto kernel = near_lse<Element, Stored, false>;
        kernel<<<ctas, mean_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}
