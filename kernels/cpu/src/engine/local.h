#pragma once

#include "engine/tasks.h"
#include "sglang_hybrid/c_api.h"

namespace sglang_hybrid {

// See sh_attend_local in c_api.h. The caller has checked the lists with problem_of.
void attend_local(const char* pool, const Geometry& geometry, const sh_lists& lists, uint32_t task_blocks, uint32_t threads,
                  const uint8_t* served, float* out, float* lse, Kernels kernels);

// See sh_token_weights in c_api.h. The caller has checked the lists with problem_of.
void token_weights(const char* pool, const Geometry& geometry, const sh_lists& lists, uint32_t threads, const float* lse,
                   float* weights, WeightKernel kernel);

}  // namespace sglang_hybrid
