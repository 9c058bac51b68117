// Launchers of copies of new tokens to staged pages, and of staged pages from and to the pool.
#include <algorithm>

#include "launching.h"
#include "sglang_hybrid/cuda/place_tokens.cuh"
#include "sglang_hybrid/cuda/scatter_blocks.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_place_tokens(const sh_place_tokens* args, cudaStream_t stream) {
    if (args->head_dim % 8 || args->key_stride % 8 || args->value_stride % 8) return cudaErrorInvalidValue;
    if (args->tokens == 0) return cudaSuccess;
    const auto place = [&](auto kernel) {
        kernel<<<args->tokens, place_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    };
    switch (static_cast<DType>(args->dtype)) {
        case DType::bf16:
        case DType::fp16: return place(place_tokens<Float16, Float16>);  // values of 16 bits are copied as they are
        case DType::fp8_bf16: return place(place_tokens<BFloat16, Fp8>);
        case DType::fp8_fp16: return place(place_tokens<Float16, Fp8>);
        default: return cudaErrorInvalidValue;
    }
}

SH_CUDA_API int sh_cuda_scatter_blocks(const sh_scatter_blocks* args, cudaStream_t stream) {
    if (args->block_bytes % 16 || args->slots == 0 || args->kv_heads == 0 || args->ctas == 0) return cudaErrorInvalidValue;
    if (args->capacity == 0) return cudaSuccess;
    scatter_blocks<<<std::min(args->ctas, args->capacity), scatter_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

// All runs are checked before the first is copied: a copy engine does not check bounds.
SH_CUDA_API int sh_cuda_copy_runs(const sh_copy_runs* args, cudaStream_t stream) {
    for (uint32_t i = 0; i < args->count; ++i) {
        const sh_copy_run& run = args->runs[i];
        if (run.page < 0 || run.slot < 0 || run.pages < 0 || int64_t{run.page} + run.pages > args->pool_pages ||
            int64_t{run.slot} + run.pages > args->staged_pages) {
            return cudaErrorInvalidValue;
        }
    }
    const auto copy = [&](const sh_copy_run& run, void* pool, void* slots) {
        char* const in_pool = static_cast<char*>(pool) + uint64_t(run.page) * args->page_bytes;
        char* const staged = static_cast<char*>(slots) + uint64_t(run.slot) * args->page_bytes;
        const uint64_t bytes = uint64_t(run.pages) * args->page_bytes;
        return args->to_pool ? cudaMemcpyAsync(in_pool, staged, bytes, cudaMemcpyDeviceToHost, stream)
                             : cudaMemcpyAsync(staged, in_pool, bytes, cudaMemcpyHostToDevice, stream);
    };
    for (uint32_t i = 0; i < args->count; ++i) {
        const auto error = first_error(
            {copy(args->runs[i], args->keys, args->key_slots), copy(args->runs[i], args->values, args->value_slots)});
        if (error) return error;
    }
    return cudaSuccess;
}
