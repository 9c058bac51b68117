#pragma once

#include <cstdint>

namespace sglang_hybrid {

// See sh_read_bandwidth in c_api.h.
double read_bandwidth(const void* memory, uint64_t bytes, uint32_t threads, const int32_t* cores);

}  // namespace sglang_hybrid
