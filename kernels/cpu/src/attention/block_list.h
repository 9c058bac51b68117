// The blocks of one BlockAttention in the order in which they are attended, and the prefetches of blocks ahead.
//
// Everything that a variant's file includes is in an unnamed namespace. The files are compiled for different instruction sets;
// if they shared a function by name, the linker would pick one copy of it for all of them.
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

// Return block `index` of this list continued by the caller's next list. Null pointers: neither list has such a block.
inline Block block_ahead(const BlockAttention& work, uint32_t index) {
    if (index < work.count) {
        return block_of(work, index);
    }
    if (work.next && index - work.count < work.next->count) {
        return block_of(*work.next, index - work.count);
    }
    return {nullptr, nullptr, 0};
}

// Answer an empty list: an LSE of -inf. No output is needed, since merging such a result changes nothing.
inline void answer_empty(const BlockAttention& work) {
    for (uint32_t head = 0; head < work.group; ++head) {
        work.lse[head] = -INFINITY;
    }
}

// Return a whole block of values with zeros behind the last token. Kernels multiply values behind the last token by 0, which
// would not remove NaN or infinity. `padded` holds a block.
inline const char* values_or_zero(const Block& block, uint32_t row_bytes, char* padded) {
    if (block.tokens == block_tokens) {
        return block.values;
    }
    const uint32_t bytes = block.tokens * row_bytes;
    memcpy(padded, block.values, bytes);
    memset(padded + bytes, 0, block_tokens * row_bytes - bytes);
    return padded;
}

// Cache levels that prefetched lines go to, as arguments of __builtin_prefetch.
constexpr int first_level = 3;
constexpr int second_level = 2;

// A range of memory that a kernel prefetches line by line while it computes something else. Blocks have random addresses and
// hardware prefetchers stop at page borders, so a kernel must prefetch the next block itself.
//
// Lines go to the second-level cache: prefetches to the first level occupy its few fill buffers until memory answers.
// Reading random 8 KiB with 16 threads (Xeon, Emerald Rapids) gets 132 GB/s by way of the second level and 100 GB/s by way of
// the first. Prefetching only the beginnings of pages and leaving the rest to the hardware is slower (97 to 124 GB/s).
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

// Prefetches a block from the second-level cache into the first; does nothing if the address is null. The caller must request
// exactly as many lines as the block has, in steps known at compile time: a loop would cost more than its prefetches.
class NearLines {
  public:
    NearLines() = default;
    explicit NearLines(const char* block) : next_(block) {}

    template <uint32_t lines>
    void request() {
        if (!next_) {
            return;
        }
#pragma GCC unroll 64
        for (uint32_t line = 0; line < lines; ++line) {
            __builtin_prefetch(next_ + line * cache_line, 0, first_level);
        }
        next_ += lines * cache_line;
    }

  private:
    const char* next_ = nullptr;
};

// Prefetches the blocks ahead: a stream through a list and on into the caller's next list.
//
// The stream consists of units. Unit u is the keys of block u + 1 and the values of block u, which are used at about the same
// time, since logits are computed a block ahead. The previous call has already requested the keys of block 0 and unit 0 if it
// knew of this call (BlockAttention::next). Lines must be on their way from memory all the time, between lists too: a core can
// have only some 48 lines outstanding, which is 0.3 us of its share of the bandwidth with 16 threads.
//
// Within a unit, lines are requested in turns. A turn is four lines: one of each half of the keys and of the values. With one
// thread this order reads 14.6 GB/s, page by page 10.7 GB/s, perhaps because hardware prefetchers have time to run ahead in
// each of four pages; with 16 threads the order makes no difference.
//
// Kernels call request() often, for a few turns each: requests that come faster than memory answers seem to get lost. Reading
// a block 5 us after its request took 1600 to 2100 cycles if all lines were requested at once (16 threads, same machine), 1070
// to 1090 if they were requested 16 at a time, and 870 to 900 when surely all of the block was in the cache.
class RequestStream {
  public:
    static constexpr uint32_t lines_of_turn = 4;

    RequestStream(const BlockAttention& work, uint32_t bytes)
        : work_(work), bytes_(bytes), unit_turns_(2 * bytes / cache_line / lines_of_turn) {
        // True if the previous call requested this list's beginning. Not for lists of a single block, for which the
        // stream would have to look two lists ahead.
        const bool begun = last_.next == &work && last_.pages == work.pages;
        if (!begun) {
            LineStream(block_of(work, 0).keys, bytes).request_all();
            LineStream(block_of(work, 0).values, bytes).request_all();
        }
        turn_ = begun ? last_.turns : 0;
        enter(turn_ / unit_turns_);
    }

    // Limit the turns requested until the end of step `step`. A list has one step before its first block (step 0) and one
    // per block, and the requests are spread over all of these steps.
    void allow(uint32_t step) {
        const uint64_t turns = uint64_t{step + 1} * unit_turns_ * work_.count / (work_.count + 1);
        limit_ = unit_turns_ + static_cast<uint32_t>(turns);
    }

    // Begin the next list: request the rest of what it begins with, and allow requests of what it needs later.
    void enter_next_list() {
        if (work_.count > 1) {
            request(limit_ - turn_);
        }
        limit_ += unit_turns_;
    }

    void request(uint32_t turns) {
        const uint32_t stop = turn_ + turns < limit_ ? turn_ + turns : limit_;
        for (; turn_ < stop; ++turn_) {
            if (at_ == end_) {
                enter(unit_ + 1);
            }
            if (end_ == 0) {
                return;
            }
#pragma GCC unroll 4
            for (const char* way : ways_) {
                __builtin_prefetch(way + at_, 0, second_level);
            }
            at_ += cache_line;
        }
    }

    // Record for the next call which of its lines this call has requested.
    void leave() {
        const BlockAttention* const next = work_.next;
        const uint32_t own = work_.count * unit_turns_;
        const bool begun = next && next->count > 1 && work_.count > 1 && turn_ >= own + unit_turns_;
        last_ = begun ? Last{next, next->pages, turn_ - own} : Last{};
    }

  private:
    struct Last {
        const BlockAttention* next;
        const uint32_t* pages;
        uint32_t turns;
    };

    void enter(uint32_t unit) {
        unit_ = unit;
        const char* const keys = block_ahead(work_, unit + 1).keys;
        const char* const values = block_ahead(work_, unit).values;
        end_ = keys || values ? bytes_ / 2 : 0;
        at_ = end_ ? turn_ % unit_turns_ * cache_line : 0;
        const char* const first = keys ? keys : values;
        const char* const second = values ? values : keys;
        ways_[0] = first;
        ways_[1] = first + end_;
        ways_[2] = second;
        ways_[3] = second + end_;
    }

    const BlockAttention& work_;
    const uint32_t bytes_;  // bytes of a full block's keys; a block that is not full is requested in full too
    const uint32_t unit_turns_;
    uint32_t unit_;
    uint32_t turn_;       // next turn of the whole stream
    uint32_t limit_ = 0;  // turn of the whole stream at which requests stop
    const char* ways_[lines_of_turn];  // the four ranges of the unit
    uint32_t at_;   // offset into each range
    uint32_t end_;  // bytes of each range; 0: no block is ahead

    static inline thread_local Last last_{};  // left by this thread's previous call. An error here costs only time
};

// Prefetch one line of each page of a block that is prefetched as a whole at least a block later. Walking the page table takes
// as long as reading memory. Without this function the prefetches of a whole block would wait for the walks one after the
// other, and computation with them. With 16 threads and small pages (same machine) attention gets 118 to 124 GB/s, without 104
// to 111.
inline void find_pages(const Block& block, uint32_t row_bytes) {
    constexpr uint32_t smallest_page = 4096;
    for (uint32_t offset = 0; offset < block.tokens * row_bytes; offset += smallest_page) {
        __builtin_prefetch(block.keys + offset, 0, 2);
        __builtin_prefetch(block.values + offset, 0, 2);
    }
}

}  // namespace
}  // namespace sglang_hybrid
