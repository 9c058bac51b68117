#include "attention/neon_lanes.h"
#include "attention/variants.h"
#include "attention/vector_kernel.h"

namespace sglang_hybrid {

Kernel neon_kernel(DType dtype, uint32_t head_dim) { return vector_kernel<NeonLanes>(dtype, head_dim); }

}  // namespace sglang_hybrid
