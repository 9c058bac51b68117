// Launchers for attention weights of single tokens.
#include "launching.h"
#include "sglang_hybrid/cuda/cumulative_share.cuh"
#include "sglang_hybrid/cuda/lookup_logits.cuh"

using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_lookup_logits(const sh_lookup_logits* args, cudaStream_t stream) {
    if (args->lists == 0 || args->tokens == 0) return cudaSuccess;
    const uint64_t ctas = uint64_t{args->lists} * ((uint64_t{args->tokens} + lookup_tile - 1) / lookup_tile);
    const bool fits = args->centroids > 0 && uint64_t{args->centroids} * sizeof(float) <= lookup_shared_bytes;
    if (!fits || args->groups == 0 || args->group == 0 || ctas > INT32_MAX) return cudaErrorInvalidValue;
    if (args->index_bytes != 1 && args->index_bytes != 2) return cudaErrorInvalidValue;
    const uint32_t at_a_time = lookup_groups(args->groups, args->centroids);
    const uint32_t bytes = at_a_time * args->centroids * sizeof(float);
    const auto kernel = args->index_bytes == 1 ? lookup_logits<uint8_t> : lookup_logits<uint16_t>;
    if (const auto error = allow_shared(kernel, bytes)) return error;
    kernel<<<static_cast<uint32_t>(ctas), lookup_threads, bytes, stream>>>(*args, at_a_time);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_cumulative_share(const sh_cumulative_share* args, cudaStream_t stream) {
    if (args->lists == 0 || args->entries == 0) return cudaSuccess;
    if (args->entries > share_most_entries || args->lists > INT32_MAX) return cudaErrorInvalidValue;
    cumulative_share<<<args->lists, share_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}
