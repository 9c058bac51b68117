// The two halves of attention as kernels of their own: token weights, and sums of values by given weights.
#include "attention/portable_lanes.h"
#include "attention/variants.h"
#include "attention/vector_sums.h"
#include "attention/vector_weights.h"

namespace sglang_hybrid {

SumKernel portable_sum_kernel(DType dtype, uint32_t head_dim) { return vector_sum_kernel<PortableLanes>(dtype, head_dim); }

WeightKernel portable_weight_kernel(DType dtype, uint32_t head_dim) {
    return vector_weight_kernel<PortableLanes>(dtype, head_dim);
}

}  // namespace sglang_hybrid
