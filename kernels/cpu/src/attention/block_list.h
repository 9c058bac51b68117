// The blocks of one BlockAttention in the order in which they are attended.
//
// Everything that a variant's file includes is in an unnamed namespace: the files are compiled for different
// instruction sets, and a function they shared by name would be the linker's pick among them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

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

// Block `index` of this list and of the caller's next one; without address where neither has it.
inline Block block_ahead(const BlockAttention& work, uint32_t index) {
    if (index < work.count) {
        return block_of(work, index);
    }
    if (work.next && index - work.count < work.next->count) {
        return block_of(*work.next, index - work.count);
    }
    return {nullptr, nullptr, 0};
}

// Of an empty list: merging it changes nothing, so that there is no need for an output.
inline void answer_empty(const BlockAttention& work) {
    for (uint32_t head = 0; head < work.group; ++head) {
        work.lse[head] = -INFINITY;
    }
}

// A whole block of values for kernels that multiply those behind the last token by 0, which silences neither NaN nor
// infinity. `padded` has room for a block.
inline const char* values_or_zero(const Block& block, uint32_t row_bytes, char* padded) {
    if (block.tokens == block_tokens) {
        return block.values;
    }
    const uint32_t bytes = block.tokens * row_bytes;
    memcpy(padded, block.values, bytes);
    memset(padded + bytes, 0, block_tokens * row_bytes - bytes);
    return padded;
}

// Where requested lines go, as __builtin_prefetch counts.
constexpr int first_level = 3;
constexpr int second_level = 2;

// A range of memory that is requested line by line while something else is computed. Blocks lie at random places and
// hardware prefetchers stop at page borders, so a kernel has to ask for the next block itself.
//
// It asks for the second-level cache: requests for the first level occupy its few fill buffers until memory answers.
// Reading random 8 KiB with 16 threads (Xeon, Emerald Rapids) gets 132 GB/s like this and 100 GB/s by way of the first
// level. Requesting only the beginnings of pages and leaving the rest to the hardware is slower (97 to 124 GB/s).
template <int level>
class LinesInto {
public:
    LinesInto() = default;
    LinesInto(const char* begin, uint32_t bytes) : next_(begin), end_(begin + bytes) {}

    void request(uint32_t lines) {
        const char* stop = next_ + lines * cache_line;
        request_until(stop < end_ ? stop : end_);
    }

    void request_all() { request_until(end_); }

private:
    void request_until(const char* stop) {
        for (; next_ < stop; next_ += cache_line) {
            __builtin_prefetch(next_, 0, level);
        }
    }

    const char* next_ = nullptr;
    const char* end_ = nullptr;
};

using LineStream = LinesInto<second_level>;
using NearLines = LinesInto<first_level>;  // for lines that are in the second level already

// The keys of one block and the values of another, requested in turns: a line of each half of both. With one thread
// that reads 14.6 GB/s instead of 10.7 page by page, perhaps because hardware prefetchers have time to run ahead in
// each of four pages; with 16 threads it makes no difference.
//
// To be called often for a few turns each: requests that come faster than memory answers seem to get lost. Reading a
// block 5 us after it was requested took 1600 to 2100 cycles if that was done at once (16 threads, same machine), 1070
// to 1090 if it was done 16 lines at a time, and 870 to 900 when surely all of it was there.
class BlockRequests {
public:
    static constexpr uint32_t lines_of_turn = 4;

    // Null where there is nothing to ask for. `bytes` of each; of a block that is not full there is more than it needs.
    BlockRequests(const char* keys, const char* values, uint32_t bytes) : end_(keys || values ? bytes / 2 : 0) {
        const char* const first = keys ? keys : values;
        const char* const second = values ? values : keys;
        ways_[0] = first;
        ways_[1] = first + end_;
        ways_[2] = second;
        ways_[3] = second + end_;
    }

    void request(uint32_t turns) {
        const uint32_t stop = at_ + turns * cache_line;
        request_until(stop < end_ ? stop : end_);
    }

    void request_all() { request_until(end_); }

private:
    void request_until(uint32_t stop) {
        for (; at_ < stop; at_ += cache_line) {
#pragma GCC unroll 4
            for (const char* way : ways_) {
                __builtin_prefetch(way + at_, 0, second_level);
            }
        }
    }

    const char* ways_[lines_of_turn];
    uint32_t at_ = 0;
    uint32_t end_;
};

// Ask for one line of each page of a block that is requested as a whole a block later. Walking the page table takes as
// long as reading memory; requests of a whole block would wait for the walk one after the other, and computing with
// them. With 16 threads and small pages (same machine) attention gets 118 to 124 GB/s like this, 104 to 111 without.
inline void find_pages(const Block& block, uint32_t row_bytes) {
    constexpr uint32_t smallest_page = 4096;
    for (uint32_t offset = 0; offset < block.tokens * row_bytes; offset += smallest_page) {
        __builtin_prefetch(block.keys + offset, 0, 2);
        __builtin_prefetch(block.values + offset, 0, 2);
    }
}

}  // namespace
}  // namespace sglang_hybrid
