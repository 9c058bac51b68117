// Launchers for codes of keys, attention weights that are computed from codes, and sums of values.
#include "attend_launch.h"
#include "sglang_hybrid/cuda/finish_sums.cuh"
#include "sglang_hybrid/cuda/keep_tokens.cuh"
#include "sglang_hybrid/cuda/token_logits.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

bool is_half(uint32_t dtype) { return static_cast<DType>(dtype) == DType::bf16 || static_cast<DType>(dtype) == DType::fp16; }

bool is_served(const sh_key_codes& codes) {
    if (!is_half(codes.dtype) || codes.head_dim == 0 || codes.head_dim > max_head_dim) return false;
    if (!codes.centroids) return codes.code_bytes == codes.head_dim * 2;
    const bool is_index = codes.index_bytes == 1 || codes.index_bytes == 2;
    return is_index && codes.groups > 0 && codes.head_dim % codes.groups == 0 && codes.count > 0 &&
           codes.count <= 1u << 8 * codes.index_bytes && codes.code_bytes == codes.groups * codes.index_bytes &&
           (codes.books == 1 || codes.books == codes.groups);
}

template <class Element>
cudaError_t launch_quantised(const sh_token_logits& args, uint64_t lists, cudaStream_t stream) {
    const uint64_t tiles = (uint64_t{args.step.max_blocks} * block_tokens + lookup_row_tile - 1) / lookup_row_tile;
    const uint32_t at_a_time = row_groups(args.codes.groups, args.codes.count);
    if (at_a_time == 0 || lists * tiles > INT32_MAX) return cudaErrorInvalidValue;
    const uint32_t bytes = at_a_time * args.codes.count * uint32_t(sizeof(float));
    const auto kernel = args.codes.index_bytes == 1 ? quantised_logits<Element, uint8_t> : quantised_logits<Element, uint16_t>;
    if (const auto error = allow_shared(kernel, bytes)) return error;
    kernel<<<uint32_t(lists * tiles), lookup_row_threads, bytes, stream>>>(args, at_a_time);
    return cudaGetLastError();
}

template <class Element, int kDim, int kGroup>
cudaError_t launch_group_sums(const sh_finish_sums& args, uint32_t ctas, cudaStream_t stream) {
    const auto kernel = finish_sums<Element, kDim, kGroup>;
    kernel<<<ctas, sum_threads, 0, stream>>>(args);
    return cudaGetLastError();
}

template <class Element, int kDim>
cudaError_t launch_sums(const sh_finish_sums& args, uint32_t ctas, cudaStream_t stream) {
    if (args.group <= 4) return launch_group_sums<Element, kDim, 4>(args, ctas, stream);
    if (args.group <= 8) return launch_group_sums<Element, kDim, 8>(args, ctas, stream);
    return launch_group_sums<Element, kDim, query_rows>(args, ctas, stream);
}

}  // namespace

SH_CUDA_API int sh_cuda_encode_keys(const sh_encode_keys* args, cudaStream_t stream) {
    if (!is_served(args->to) || !has_tokens(args->source)) return cudaErrorInvalidValue;
    const uint64_t ctas = uint64_t{args->source.count} * args->to.kv_heads;
    if (ctas == 0) return cudaSuccess;
    if (ctas > INT32_MAX) return cudaErrorInvalidValue;
    const auto kernel = static_cast<DType>(args->to.dtype) == DType::bf16 ? encode_keys<BFloat16> : encode_keys<Float16>;
    kernel<<<uint32_t(ctas), code_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_token_logits(const sh_token_logits* args, cudaStream_t stream) {
    const sh_key_codes& codes = args->codes;
    const uint64_t pairs = uint64_t{args->step.batch} * codes.kv_heads;
    const bool has_group = args->group > 0 && args->group <= query_rows;
    const bool fits = args->step.max_blocks <= share_most_entries / block_tokens;
    if (!is_served(codes) || !has_group || !fits) return cudaErrorInvalidValue;
    if (pairs == 0 || args->step.max_blocks == 0) return cudaSuccess;
    if (codes.centroids) {
        const uint64_t lists = pairs * args->group;
        if (static_cast<DType>(codes.dtype) == DType::bf16) return launch_quantised<BFloat16>(*args, lists, stream);
        return launch_quantised<Float16>(*args, lists, stream);
    }
    return for_heads(codes.dtype, codes.head_dim, args->group, [&](auto element, auto dim) -> cudaError_t {
        const uint64_t tiles = (uint64_t{args->step.max_blocks} + logit_tile_blocks - 1) / logit_tile_blocks;
        if (pairs * tiles > INT32_MAX) return cudaErrorInvalidValue;
        const auto kernel = whole_key_logits<decltype(element), dim()>;
        const uint32_t bytes = LogitMemory(dim()).bytes;
        if (const auto error = allow_shared(kernel, bytes)) return error;
        kernel<<<uint32_t(pairs * tiles), logit_warps * warp_size, bytes, stream>>>(*args);
        return cudaGetLastError();
    });
}

SH_CUDA_API int sh_cuda_keep_tokens(const sh_keep_tokens* args, cudaStream_t stream) {
    const uint64_t pairs = uint64_t{args->step.batch} * args->kv_heads, lists = pairs * args->group;
    if (lists == 0 || args->step.max_blocks == 0) return cudaSuccess;
    const bool fits = args->step.max_blocks <= share_most_entries / block_tokens;
    if (lists > INT32_MAX || !fits) return cudaErrorInvalidValue;
    keep_tokens<<<uint32_t(lists), share_threads, 0, stream>>>(*args);
    if (const auto error = cudaGetLastError()) return error;
    list_kept<<<uint32_t(pairs), list_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_finish_sums(const sh_finish_sums* args, cudaStream_t stream) {
    const uint64_t ctas = uint64_t{args->batch} * args->kv_heads * args->splits;
    if (args->batch == 0 || args->kv_heads == 0) return cudaSuccess;
    const bool has_group = args->group > 0 && args->group <= query_rows;
    if (!is_half(args->dtype) || !has_group || ctas == 0 || ctas > INT32_MAX) return cudaErrorInvalidValue;
    if (args->served && !args->replies) return cudaErrorInvalidValue;
    const bool is_bf16 = static_cast<DType>(args->dtype) == DType::bf16;
    switch (args->head_dim) {
        case 64: return (is_bf16 ? launch_sums<BFloat16, 64> : launch_sums<Float16, 64>)(*args, uint32_t(ctas), stream);
        case 128: return (is_bf16 ? launch_sums<BFloat16, 128> : launch_sums<Float16, 128>)(*args, uint32_t(ctas), stream);
        default: return cudaErrorInvalidValue;
    }
}
