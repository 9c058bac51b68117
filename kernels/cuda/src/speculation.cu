// Launchers for partial keys, speculated logits, and chosen tokens.
#include <algorithm>

#include "launching.h"
#include "sglang_hybrid/cuda/choose_tokens.cuh"
#include "sglang_hybrid/cuda/gather_tokens.cuh"
#include "sglang_hybrid/cuda/speculate.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

// Call use(Element{}) for shapes that these kernels support.
template <class Use>
cudaError_t for_partial_keys(const sh_partial_keys& partial, Use use) {
    const bool fits = partial.head_dim <= most_key_dim && partial.columns <= partial.head_dim;
    if (!fits || partial.columns == 0 || partial.columns % 4) return cudaErrorInvalidValue;
    switch (static_cast<DType>(partial.dtype)) {
        case DType::bf16: return use(BFloat16{});
        case DType::fp16: return use(Float16{});
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

SH_CUDA_API int sh_cuda_encode_partial_keys(const sh_encode_partial_keys* args, cudaStream_t stream) {
    if (!has_tokens(args->source)) return cudaErrorInvalidValue;
    const uint64_t ctas = uint64_t{args->source.count} * args->to.kv_heads;
    if (ctas == 0) return cudaSuccess;
    if (ctas > INT32_MAX) return cudaErrorInvalidValue;
    return for_partial_keys(args->to, [&](auto element) -> cudaError_t {
        const auto kernel = encode_partial_keys<decltype(element)>;
        const uint32_t tokens = args->source.pages ? block_tokens : 1;
        const uint32_t bytes = tokens * args->to.head_dim * uint32_t(sizeof(float));  // 16 KiB at most
        kernel<<<uint32_t(ctas), encode_threads, bytes, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_speculate(const sh_speculate* args, cudaStream_t stream) {
    const uint64_t ctas = uint64_t{args->step.batch} * args->partial.kv_heads * args->splits;
    if (args->step.batch == 0) return cudaSuccess;
    const bool fits = args->splits >= 1 && args->splits <= sh_most_splits && args->step.max_blocks <= INT32_MAX / block_tokens;
    if (!fits || args->group < 1 || args->group > query_rows || ctas > INT32_MAX) return cudaErrorInvalidValue;
    return for_partial_keys(args->partial, [&](auto element) -> cudaError_t {
        const auto best = best_logits<decltype(element)>;
        const auto ranks = rank_items<decltype(element)>;
        best<<<uint32_t(ctas), encode_threads, 0, stream>>>(*args);
        if (const auto error = cudaGetLastError()) return error;
        ranks<<<uint32_t(ctas), encode_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_choose_tokens(const sh_choose_tokens* args, cudaStream_t stream) {
    const uint32_t ctas = args->step.batch * args->kv_heads;
    if (ctas == 0) return cudaSuccess;
    const uint64_t tokens = uint64_t{args->limit} * (args->by_block ? block_tokens : 1);
    const bool is_staged = uint64_t{args->staged_blocks} * block_tokens >= tokens &&
                           uint64_t{args->staged_blocks} * block_tokens * args->step.batch <= INT32_MAX;
    const bool is_listed = args->most_blocks >= std::min(args->limit, args->step.max_blocks);
    if (args->limit == 0 || !is_staged || !is_listed) return cudaErrorInvalidValue;
    choose_tokens<<<ctas, select_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_gather_tokens(const sh_gather_tokens* args, cudaStream_t stream) {
    if (args->batch == 0 || args->kv_heads == 0) return cudaSuccess;
    if (args->token_bytes == 0 || args->token_bytes % 16 || args->ctas == 0) return cudaErrorInvalidValue;
    gather_tokens<<<args->ctas, gather_token_warps * 32, 0, stream>>>(*args);
    return cudaGetLastError();
}
