// In place of memory.cuh, as far as digests, scores and selection use it.
#pragma once

#include "cuda_on_cpu.h"

namespace sglang_hybrid::cuda {

inline uint32_t shared_address(const void* pointer) { return emulated::shared_address(pointer); }
inline uint64_t read_once_policy() { return 0; }
inline void copy_async(uint32_t to, const void* from, bool counts, uint64_t = 0) { emulated::copy_later(to, from, counts); }
inline void commit_copies() { emulated::commit(); }
template <int kPending>
void wait_for_copies() {
    emulated::wait(kPending);
}

inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
    const char* const rows = emulated::show(&row, sizeof row);
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
        const auto address = emulated::of_lane<uint32_t>(rows, matrix * 8 + threadIdx.x % 32 / 4);
        if (address % 16) std::abort();
        std::memcpy(&to[matrix], emulated::at_shared(address) + threadIdx.x % 4 * 4, 4);
    }
}

inline uint32_t active_of(const int32_t* active_rows, uint32_t batch) {
    return active_rows ? min(static_cast<uint32_t>(max(*active_rows, 0)), batch) : batch;
}

}  // namespace sglang_hybrid::cuda
