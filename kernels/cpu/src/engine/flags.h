// Flags in memory that two processes share, and functions that sleep on them. Flags are plain words accessed by atomic
// builtins, since mailbox.h defines the memory's layout and a GPU may write it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sglang_hybrid {

template <class T>
T load_acquire(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <class T, class V>
void store_release(T& word, V value) {
    __atomic_store_n(&word, static_cast<T>(value), __ATOMIC_RELEASE);
}

// load_ordered and store_ordered are sequentially consistent, for Dekker's pattern: the store of one word must be visible
// before another word is loaded.
template <class T>
T load_ordered(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}

template <class T, class V>
void store_ordered(T& word, V value) {
    __atomic_store_n(&word, static_cast<T>(value), __ATOMIC_SEQ_CST);
}

inline void pause_core() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // a longer and quieter wait than `yield`, which most cores ignore
#endif
}

// Prefetch for writing a cache line that another core's cache may hold.
inline void request_for_writing(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));  // the builtin becomes a prefetch for reading
#else
    __builtin_prefetch(line, 1);
#endif
}

inline uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

// Sleep while `word` is `seen`, at most `timeout_ns`. May return early: the caller must check its condition again.
inline void sleep_on(uint32_t& word, uint32_t seen, uint64_t timeout_ns) {
    const timespec timeout{time_t(timeout_ns / 1'000'000'000), long(timeout_ns % 1'000'000'000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

inline void wake_all(uint32_t& word) {
    __atomic_fetch_add(&word, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace sglang_hybrid
