// Threads for work of a few hundred microseconds.
#pragma once

#include <cstdint>

#include "helpers.h"

namespace sglang_hybrid {

// GOMP_parallel of an OpenMP runtime that the process has loaded already: runs work(argument) in `threads` threads, the
// calling one included. Threads of our own would compete with torch's, which wait for the next operation.
using OpenMP = void (*)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);

class Threads {
  public:
    // `openmp` may be null: threads are started for each call then.
    Threads(uint32_t count, OpenMP openmp) : count_(count), openmp_(openmp) {}

    uint32_t count() const { return count_; }

    // Call work() in so many threads at the same time, or in fewer, and wait for all of them.
    template <class Work>
    void run(uint32_t threads, Work& work) const {
        if (threads <= 1) {
            work();
        } else if (openmp_) {
            openmp_([](void* argument) { (*static_cast<Work*>(argument))(); }, &work, threads, 0);
        } else {
            const Helpers others(threads - 1, [&work](uint32_t) { work(); });
            work();
        }
    }

  private:
    uint32_t count_;
    OpenMP openmp_;
};

}  // namespace sglang_hybrid
