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

// A block that is in the second level already, requested into the first; no address: nothing. Exactly as many lines as
// it has are to be asked for, in steps that the compiler knows: a loop would cost more than its requests.
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

// Requests of the blocks ahead: a stream through a list and on into the caller's next one.
//
// The stream is made of units: unit u is the keys of block u + 1 and the values of block u, which are used at about the
// same time, since logits are computed a block ahead. The keys of block 0 and unit 0 are asked for by the call before,
// where it knew of this one (BlockAttention::next). Between two lists as within them, something has to be on its way from
// memory all the time: a core can have only some 48 lines outstanding, which is 0.3 us of its share with 16 threads.
//
// Within a unit lines are requested in turns: one of each half of the keys and of the values. With one thread that reads
// 14.6 GB/s instead of 10.7 page by page, perhaps because hardware prefetchers have time to run ahead in each of four
// pages; with 16 threads it makes no difference.
//
// To be called often for a few turns each: requests that come faster than memory answers seem to get lost. Reading a
// block 5 us after it was requested took 1600 to 2100 cycles if that was done at once (16 threads, same machine), 1070
// to 1090 if it was done 16 lines at a time, and 870 to 900 when surely all of it was there.
class RequestStream {
  public:
    static constexpr uint32_t lines_of_turn = 4;

    RequestStream(const BlockAttention& work, uint32_t bytes)
        : work_(work), bytes_(bytes), unit_turns_(2 * bytes / cache_line / lines_of_turn) {
        // between lists of a single block the stream would have to see two lists ahead
        const bool begun = last_.next == &work && last_.pages == work.pages;
        if (!begun) {
            LineStream(block_of(work, 0).keys, bytes).request_all();
            LineStream(block_of(work, 0).values, bytes).request_all();
        }
        turn_ = begun ? last_.turns : 0;
        enter(turn_ / unit_turns_);
    }

    // The work is a list's blocks and one step more, between lists. Requests are spread over all of it: up to the end of
    // step `step` (0 is the one before the first block) they may be that far.
    void allow(uint32_t step) {
        const uint64_t turns = uint64_t{step + 1} * unit_turns_ * work_.count / (work_.count + 1);
        limit_ = unit_turns_ + static_cast<uint32_t>(turns);
    }

    // A list has ended: what the next one begins with must be asked for now, what it needs later may be.
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

    // What the next call need not ask for.
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
    const uint32_t bytes_;  // of a block's keys; of a block that is not full there is more than it needs
    const uint32_t unit_turns_;
    uint32_t unit_;
    uint32_t turn_;       // of the whole stream
    uint32_t limit_ = 0;  // likewise
    const char* ways_[lines_of_turn];
    uint32_t at_;   // bytes into each way
    uint32_t end_;  // 0: there is nothing ahead

    static inline thread_local Last last_{};  // call of this thread. If it is mistaken, that costs time and nothing else
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
