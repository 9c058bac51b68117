// The blocks of one BlockAttention in the order in which they are attended.
//
// Everything that a variant's file includes is in an unnamed namespace: the files are compiled for different
// instruction sets, and a function they shared by name would be the linker's pick among them.
#pragma once

#include <stdint.h>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t cache_line = 64;

struct Block {
    const char* keys;
    const char* values;
    uint32_t tokens;
};

inline Block block_of(const BlockAttention& work, uint32_t index) {
    const uint64_t offset = work.pages[index] * work.page_stride;
    const uint32_t tokens = index + 1 == work.count ? work.last_fill : block_tokens;
    return {work.keys + offset, work.values + offset, tokens};
}

// A range of memory that is requested line by line while something else is computed. Blocks lie at random places and
// hardware prefetchers stop at page borders, so a kernel has to ask for the next block itself.
class LineStream {
public:
    LineStream() = default;
    LineStream(const char* begin, uint32_t bytes) : next_(begin), end_(begin + bytes) {}

    void request(uint32_t lines) {
        for (; lines > 0 && next_ < end_; --lines, next_ += cache_line) {
            __builtin_prefetch(next_, 0, 3);
        }
    }

    void request_all() {
        for (; next_ < end_; next_ += cache_line) {
            __builtin_prefetch(next_, 0, 3);
        }
    }

private:
    const char* next_ = nullptr;
    const char* end_ = nullptr;
};

}  // namespace
}  // namespace sglang_hybrid
