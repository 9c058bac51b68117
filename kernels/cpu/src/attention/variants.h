// The variants of block attention, and what each one has.
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {

// What a variant has for a shape, null for nothing. Only to be called on a machine that can run the variant.
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
    SumKernel (*sum_kernel)(DType dtype, uint32_t head_dim);  // null: that of the next simpler variant
    WeightKernel (*weight_kernel)(DType dtype, uint32_t head_dim);  // likewise
    bool available;  // processor and operating system can run it
};

struct VariantList {
    const Variant* first;
    uint32_t count;
};

// The variants of this processor architecture, fastest first; the last one runs everywhere and has every shape.
// Looks at the machine on the first call only.
VariantList known_variants();

}  // namespace sglang_hybrid
