// Threads that help the calling one, as many of them as the system lets us have.
#pragma once

#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace sglang_hybrid {

class Helpers {
  public:
    // Start `count` threads that run work(number), numbers from 1. A limit on threads or on memory means fewer of them, so
    // what they do must be shared out as they take it, or counted by `started`.
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
