// Launchers of prediction.
#include "launching.h"
#include "sglang_hybrid/cuda/predict.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_unit_rms(const sh_unit_rms* args, cudaStream_t stream) {
    const auto dtype = static_cast<DType>(args->dtype);
    if ((dtype != DType::bf16 && dtype != DType::fp16) || args->width == 0 || args->width > most_rms_width || args->width % 8 ||
        args->hidden_stride % 8 || args->residual_stride % 8) {
        return cudaErrorInvalidValue;
    }
    if (args->batch == 0) return cudaSuccess;
    const auto kernel = dtype == DType::bf16 ? unit_rms<BFloat16> : unit_rms<Float16>;
    kernel<<<args->batch, rms_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_finish_queries(const sh_finish_queries* args, cudaStream_t stream) {
    const auto dtype = static_cast<DType>(args->dtype), rotary = static_cast<DType>(args->rotary_dtype);
    if ((dtype != DType::bf16 && dtype != DType::fp16) || (rotary != dtype && rotary != DType::fp32) || args->head_dim % 2 ||
        args->head_dim > max_head_dim || args->rotary_dim % 2 || args->rotary_dim > args->head_dim || args->rotary_rows == 0) {
        return cudaErrorInvalidValue;
    }
    const uint64_t heads = uint64_t{args->batch} * args->heads;
    if (heads == 0) return cudaSuccess;
    const auto kernel = dtype == DType::bf16 ? finish_queries<BFloat16> : finish_queries<Float16>;
    kernel<<<uint32_t((heads + finish_warps - 1) / finish_warps), finish_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}
