#include "attention/avx512_lanes.h"
#include "host/vector_loops.h"

namespace sglang_hybrid {

const HostLoops avx512_loops = VectorLoops<Avx512Lanes>::named("avx512");

}  // namespace sglang_hybrid
