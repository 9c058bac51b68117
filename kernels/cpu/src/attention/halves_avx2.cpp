// The two halves of attention as kernels of their own: token weights, and sums of values by given weights.
#include "attention/avx2_lanes.h"
#include "attention/variants.h"
#include "attention/vector_sums.h"
#include "attention/vector_weights.h"

namespace sglang_hybrid {

SumKernel avx2_sum_kernel(DType dtype, uint32_t head_dim) { return vector_sum_kernel<Avx2Lanes>(dtype, head_dim); }

WeightKernel avx2_weight_kernel(DType dtype, uint32_t head_dim) { return vector_weight_kernel<Avx2Lanes>(dtype, head_dim); }

}  // namespace sglang_hybrid
