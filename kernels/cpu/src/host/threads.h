// Threads for parallel work of a few hundred microseconds.
#pragma once

#include <cstdint>

#include "helpers.h"

namespace sglang_hybrid {

// The function GOMP_parallel of an OpenMP runtime that the process has already loaded: runs work(argument) in `threads`
// threads, the calling one included. Own threads would compete for cores with torch's threads, which wait for the next
// operation.
using OpenMP = void (*)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);

class Threads {
  public:
    // If `openmp` is null, each call of run() starts threads.
    Threads(uint32_t count, OpenMP openmp) : count_(count), openmp_(openmp) {}

    uint32_t count() const { return count_; }

    // Call work() in `threads` threads at the same time, or in fewer if the system does not allow so many, and wait for
    // all.
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
