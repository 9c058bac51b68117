// Launchers for the keys of a step and of whole pages.
#include "launching.h"
#include "sglang_hybrid/cuda/append.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

// Call use(Element{}, Stored{}), the dtypes of model and pool, for digests that kernels support.
template <class Use>
cudaError_t for_keys(const sh_digests& digests, Use use) {
    if (digests.compact && (digests.head_dim % 32 || digests.channel_count % 8 || !digests.channel_count)) {
        return cudaErrorInvalidValue;
    }
    const bool is_served = digests.head_dim % 8 == 0 && digests.head_dim > 0 && digests.head_dim <= max_head_dim &&
                           digests.channel_count % 2 == 0 && digests.channel_count <= digests.head_dim;
    if (!is_served) return cudaErrorInvalidValue;
    switch (static_cast<DType>(digests.dtype)) {
        case DType::bf16: return use(BFloat16{}, BFloat16{});
        case DType::fp16: return use(Float16{}, Float16{});
        case DType::fp8_bf16: return use(BFloat16{}, Fp8{});
        case DType::fp8_fp16: return use(Float16{}, Fp8{});
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

SH_CUDA_API int sh_cuda_append(const sh_append* args, cudaStream_t stream) {
    return for_keys(args->digests, [&](auto element, auto stored) -> cudaError_t {
        const uint32_t ctas = args->step.batch * args->digests.kv_heads;
        if (ctas == 0) return cudaSuccess;
        using Element = decltype(element);
        using Stored = decltype(stored);
        if (args->steps) {
            // codes are of 16-bit numbers, and whole rows are held as the pool has them
            if (!std::is_same_v<Element, Stored> || args->dense.pages) return cudaErrorInvalidValue;
            const auto encoding = append_tokens<Element, Element, true>;
            encoding<<<ctas, digest_threads, 0, stream>>>(*args);
            return cudaGetLastError();
        }
        const auto kernel = append_tokens<Element, Stored, false>;
        if (args->overlaps) return launch_overlapping(kernel, ctas, digest_threads, 0, stream, *args);
        kernel<<<ctas, digest_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_digest_pages(const sh_digest_pages* args, cudaStream_t stream) {
    const sh_new_keys& source = args->source;
    const bool is_aligned = source.page_stride % 8 == 0 && source.head_stride % 8 == 0 && source.token_stride % 8 == 0;
    if (!is_aligned || (source.count && !source.pages)) return cudaErrorInvalidValue;
    return for_keys(args->digests, [&](auto element, auto stored) -> cudaError_t {
        const uint32_t ctas = source.count * args->digests.kv_heads;
        if (ctas == 0) return cudaSuccess;
        const auto kernel = digest_pages<decltype(element), decltype(stored)>;
        kernel<<<ctas, digest_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}
