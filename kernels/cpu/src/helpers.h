// Helper threads of a calling thread: up to a requested number, as many as the system allows.
#pragma once

#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace sglang_hybrid {

class Helpers {
  public:
    // Start up to `count` threads that run work(number), with numbers from 1. Limits on threads or memory may allow fewer.
    // So the threads must take their work from a shared counter, or the caller must divide it by started().
    template <class Work>
    Helpers(uint32_t count, Work work) {
        threads_.reserve(count);
        try {
            for (uint32_t number = 1; number <= count; ++number) threads_.emplace_back(work, number);
        } catch (const std::exception&) {
        }
    }
    ~Helpers() { join(); }
    Helpers(const Helpers&) = delete;

    uint32_t started() const { return uint32_t(threads_.size()); }
    void join() {
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

  private:
    std::vector<std::thread> threads_;
};

}  // namespace sglang_hybrid
