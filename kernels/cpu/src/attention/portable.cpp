#include "attention/portable_lanes.h"
#include "attention/variants.h"
#include "attention/vector_kernel.h"

namespace sglang_hybrid {

Kernel portable_kernel(DType dtype, uint32_t head_dim) { return vector_kernel<PortableLanes>(dtype, head_dim); }

}  // namespace sglang_hybrid
