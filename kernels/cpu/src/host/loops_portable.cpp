#include "attention/portable_lanes.h"
#include "host/vector_loops.h"

namespace sglang_hybrid {

const HostLoops portable_loops = VectorLoops<PortableLanes>::named("portable");

}  // namespace sglang_hybrid
