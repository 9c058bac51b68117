#pragma once

#include "sglang_hybrid/c_api.h"

namespace sglang_hybrid {

// See sh_attend_local. The lists must have no problem.
void attend_local(const char* pool, const Geometry& geometry, const sh_lists& lists, uint32_t task_blocks, uint32_t threads,
                  const uint8_t* served, float* out, float* lse, Kernel kernel);

}  // namespace sglang_hybrid
