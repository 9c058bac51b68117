// Measurement of this host's memory bandwidth: the upper bound of what block attention can reach.
#include "engine/read_bandwidth.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>

#include "engine/flags.h"
#include "helpers.h"

namespace sglang_hybrid {
namespace {

// The widest vector the compiler splits well on any machine; eight sums hide the latency of adding.
using Vector __attribute__((vector_size(64))) = uint64_t;
constexpr uint64_t lanes = 8;
constexpr uint64_t piece_bytes = 1 << 20;  // taken one by one, so that a delayed thread does not delay the result

inline __attribute__((always_inline)) uint64_t sum_with(const char* start, uint64_t bytes) {
    const Vector* const data = reinterpret_cast<const Vector*>(start);
    Vector sums[lanes] = {};
    for (uint64_t i = 0; i + lanes <= bytes / sizeof(Vector); i += lanes) {
        for (uint64_t lane = 0; lane < lanes; ++lane) sums[lane] ^= data[i + lane];
    }
    uint64_t sum = 0;
    for (const Vector& vector : sums) sum ^= vector[0] ^ vector[7];
    return sum;
}

// Dispatched by hand: the compiler's own dispatch runs before the thread sanitizer is initialised.
#if defined(__x86_64__)
__attribute__((target("avx512f"))) uint64_t sum_avx512(const char* start, uint64_t bytes) { return sum_with(start, bytes); }
__attribute__((target("avx2"))) uint64_t sum_avx2(const char* start, uint64_t bytes) { return sum_with(start, bytes); }
#endif

uint64_t sum_of(const char* start, uint64_t bytes) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return sum_avx512(start, bytes);
    if (__builtin_cpu_supports("avx2")) return sum_avx2(start, bytes);
#endif
    return sum_with(start, bytes);
}

}  // namespace

double read_bandwidth(const void* memory, uint64_t bytes, uint32_t threads, const int32_t* cores) {
    const char* const start_of_memory = static_cast<const char*>(memory);
    const uint64_t pieces = bytes / piece_bytes;
    std::atomic<uint64_t> sink{0}, next{0};
    std::atomic<uint32_t> ready{0};
    std::atomic<bool> go{false};
    Helpers readers(threads, [&](uint32_t number) {
        if (cores) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cores[number - 1], &set);
            pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
        }
        ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) pause_core();
        uint64_t sum = 0;
        for (uint64_t piece; (piece = next.fetch_add(1)) < pieces;) {
            sum ^= sum_of(start_of_memory + piece * piece_bytes, piece_bytes);
        }
        sink.fetch_xor(sum);
    });
    if (readers.started() == 0) return 0;
    while (ready.load() < readers.started()) pause_core();
    const uint64_t start = now_ns();
    go.store(true, std::memory_order_release);
    readers.join();
    return double(pieces * piece_bytes) / (double(now_ns() - start) * 1e-9);
}

}  // namespace sglang_hybrid
