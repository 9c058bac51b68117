// Choice of the kernels that read or write the pool's numbers.
#pragma once

#include "launching.h"
#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/elements.cuh"
#include "sglang_hybrid/cuda/fp8.cuh"

// Call use(Element{}, Stored{}), the dtypes of the model and of the pool. `dtype`: DType of both.
template <class Use>
cudaError_t for_stored(uint32_t dtype, Use use) {
    using namespace sglang_hybrid;
    switch (static_cast<DType>(dtype)) {
        case DType::bf16: return use(cuda::BFloat16{}, cuda::BFloat16{});
        case DType::fp16: return use(cuda::Float16{}, cuda::Float16{});
        case DType::fp8_bf16: return use(cuda::BFloat16{}, cuda::Fp8{});
        case DType::fp8_fp16: return use(cuda::Float16{}, cuda::Fp8{});
        default: return cudaErrorInvalidValue;
    }
}
