#include "attention/avx512_lanes.h"
#include "attention/variants.h"
#include "attention/vector_kernel.h"

namespace sglang_hybrid {

Kernel avx512_kernel(DType dtype, uint32_t head_dim) { return vector_kernel<Avx512Lanes>(dtype, head_dim); }

}  // namespace sglang_hybrid
