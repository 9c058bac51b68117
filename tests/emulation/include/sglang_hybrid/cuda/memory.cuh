// In place of memory.cuh. A host that writes meanwhile is another thread of this process.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

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

// original rows 2j and 2j + 1 of column i
inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) {
    const char* const rows = emulated::show(&row, sizeof row);
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
        to[matrix] = 0;
        for (uint32_t k = 0; k < 2; ++k) {
            const auto address = emulated::of_lane<uint32_t>(rows, matrix * 8 + threadIdx.x % 4 * 2 + k);
            if (address % 16) std::abort();
            uint16_t value;
            std::memcpy(&value, emulated::at_shared(address) + threadIdx.x % 32 / 4 * 2, 2);
            to[matrix] |= uint32_t{value} << 16 * k;
        }
    }
}

// launches are over when they return
inline void let_next_begin() {}
inline void wait_for_launch_before() {}

inline uint32_t transposed_matrix(uint32_t pair) {
    const char* const rows = emulated::show(&pair, sizeof pair);
    const uint32_t i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    uint32_t turned = 0;
    for (uint32_t k = 0; k < 2; ++k) {
        const auto found = emulated::of_lane<uint32_t>(rows, (2 * j + k) * 4 + i / 2);
        turned |= (found >> i % 2 * 16 & 0xFFFF) << 16 * k;
    }
    return turned;
}

inline uint4 load_once(const uint4* from) { return *from; }
inline uint64_t load_acquire(const uint64_t& word) {
    return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}
inline void store_release(uint64_t& word, uint64_t value) { std::atomic_ref(word).store(value, std::memory_order_release); }
template <class T>
void store_relaxed(T& word, std::type_identity_t<T> value) {
    std::atomic_ref(word).store(value, std::memory_order_relaxed);
}
inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void __nanosleep(uint32_t) { std::this_thread::yield(); }

inline uint32_t active_of(const int32_t* active_rows, uint32_t batch) {
    return active_rows ? min(static_cast<uint32_t>(max(*active_rows, 0)), batch) : batch;
}

}  // namespace sglang_hybrid::cuda
