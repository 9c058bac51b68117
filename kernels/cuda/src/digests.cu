// Keys of a step and of whole pages: launchers.
#include "launching.h"
#include "sglang_hybrid/cuda/append.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

bool is_served(const sh_digests& digests) {
    const auto dtype = static_cast<DType>(digests.dtype);
    if (digests.compact && (digests.head_dim % 32 || digests.channel_count % 8 || !digests.channel_count)) return false;
    return (dtype == DType::bf16 || dtype == DType::fp16) && digests.head_dim % 8 == 0 && digests.head_dim > 0 &&
           digests.head_dim <= max_head_dim && digests.channel_count % 2 == 0 && digests.channel_count <= digests.head_dim;
}

}  // namespace

SH_CUDA_API int sh_cuda_append(const sh_append* args, cudaStream_t stream) {
    const sh_digests& digests = args->digests;
    if (!is_served(digests)) return cudaErrorInvalidValue;
    const uint32_t ctas = args->step.batch * digests.kv_heads;
    if (ctas == 0) return cudaSuccess;
    const auto kernel = static_cast<DType>(digests.dtype) == DType::bf16 ? append_tokens<BFloat16> : append_tokens<Float16>;
    if (args->overlaps) return launch_overlapping(kernel, ctas, digest_threads, 0, stream, *args);
    kernel<<<ctas, digest_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_digest_pages(const sh_digest_pages* args, cudaStream_t stream) {
    const sh_digests& digests = args->digests;
    const sh_new_keys& source = args->source;
    const bool is_aligned = source.page_stride % 8 == 0 && source.head_stride % 8 == 0 && source.token_stride % 8 == 0;
    if (!is_served(digests) || !is_aligned || (source.count && !source.pages)) return cudaErrorInvalidValue;
    const uint32_t ctas = source.count * digests.kv_heads;
    if (ctas == 0) return cudaSuccess;
    const auto kernel = static_cast<DType>(digests.dtype) == DType::bf16 ? digest_pages<BFloat16> : digest_pages<Float16>;
    kernel<<<ctas, digest_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}
