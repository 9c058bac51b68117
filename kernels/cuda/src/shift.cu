// Launcher of shift_lse.
#include "digest_shapes.h"
#include "sglang_hybrid/cuda/shift_lse.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_shift_lse(const sh_shift_lse* args, cudaStream_t stream) {
    const uint32_t ctas = args->batch * args->digests.kv_heads;
    if (ctas == 0) return cudaSuccess;
    if (args->group < 1 || args->group > shift_heads) return cudaErrorInvalidValue;
    return for_element(args->digests, [&](auto element) {
        return for_shape(args->digests, [&](auto dim, auto channels, auto format) {
            using Here = Octet<dim(), channels(), format()>;
            const auto kernel = shift_lse<decltype(element), dim(), channels(), format()>;
            const uint32_t bytes = shift_warps * (Here::bytes + Here::step_bytes);
            if (const auto error = allow_shared(kernel, bytes)) return error;
            kernel<<<ctas, shift_threads, bytes, stream>>>(*args);
            return cudaGetLastError();
        });
    });
}
