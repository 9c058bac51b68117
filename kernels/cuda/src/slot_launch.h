// Choice of the kernels that write slots.
#pragma once

#include <cuda_runtime.h>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/elements.cuh"

// Call use.template operator()<Element>(), with Element as for copy_to_slots. `dtype`: DType of blocks, of `block_bytes` bytes,
// that become codes if there are `steps`.
template <class Use>
cudaError_t for_slots(const float* steps, uint32_t dtype, uint32_t block_bytes, Use use) {
    using namespace sglang_hybrid;
    if (!steps) return use.template operator()<void>();
    if (block_bytes % (block_tokens * sizeof(uint4))) return cudaErrorInvalidValue;
    switch (static_cast<DType>(dtype)) {
        case DType::bf16: return use.template operator()<cuda::BFloat16>();
        case DType::fp16: return use.template operator()<cuda::Float16>();
        default: return cudaErrorInvalidValue;
    }
}
