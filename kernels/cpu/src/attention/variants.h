// The variants of block attention (one per instruction set), and the kernels of each variant.
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {

// Return the variant's kernel for a shape, or null if the variant has none. Call these functions only on a machine that can
// run the variant.
Kernel amx_kernel(DType dtype, uint32_t head_dim);
Kernel avx512_kernel(DType dtype, uint32_t head_dim);
Kernel avx2_kernel(DType dtype, uint32_t head_dim);
Kernel neon_bf16_kernel(DType dtype, uint32_t head_dim);
Kernel neon_kernel(DType dtype, uint32_t head_dim);
Kernel portable_kernel(DType dtype, uint32_t head_dim);
SumKernel avx512_sum_kernel(DType dtype, uint32_t head_dim);
SumKernel avx2_sum_kernel(DType dtype, uint32_t head_dim);
SumKernel neon_sum_kernel(DType dtype, uint32_t head_dim);
SumKernel portable_sum_kernel(DType dtype, uint32_t head_dim);
WeightKernel avx512_weight_kernel(DType dtype, uint32_t head_dim);
WeightKernel avx2_weight_kernel(DType dtype, uint32_t head_dim);
WeightKernel neon_weight_kernel(DType dtype, uint32_t head_dim);
WeightKernel portable_weight_kernel(DType dtype, uint32_t head_dim);

struct Variant {
    const char* name;
    Kernel (*kernel)(DType dtype, uint32_t head_dim);
    SumKernel (*sum_kernel)(DType dtype, uint32_t head_dim);  // null: the next simpler variant's is used
    WeightKernel (*weight_kernel)(DType dtype, uint32_t head_dim);  // as above
    bool available;  // processor and operating system can run the variant
};

struct VariantList {
    const Variant* first;
    uint32_t count;
};

// Return the variants of this processor architecture, fastest first. The last one runs everywhere and has every shape. Only
// the first call examines the machine.
VariantList known_variants();

}  // namespace sglang_hybrid
