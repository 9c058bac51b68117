#include "attention/avx2_lanes.h"
#include "host/vector_loops.h"

namespace sglang_hybrid {

const HostLoops avx2_loops = VectorLoops<Avx2Lanes>::named("avx2");

}  // namespace sglang_hybrid
