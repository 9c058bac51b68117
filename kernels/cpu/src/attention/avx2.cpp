#include "attention/avx2_lanes.h"
#include "attention/variants.h"
#include "attention/vector_kernel.h"

namespace sglang_hybrid {

Kernel avx2_kernel(DType dtype, uint32_t head_dim) { return vector_kernel<Avx2Lanes>(dtype, head_dim); }

}  // namespace sglang_hybrid
