// Prefetches of lines during the computation of a block.
#pragma once

#include <stdint.h>

#include "attention/block_list.h"

namespace sglang_hybrid {
namespace {

// Prefetches two ranges of a block's size: the far one from memory into the second-level cache, the near one from the second
// level into the first. In fp32 the first level (64 KiB on a Neoverse N1) cannot hold a whole block ahead, and tiles that find
// their lines in the second level wait for them: 7.6 GB/s with one thread in fp32, 8.8 with both ranges. If one address is
// null, the other range is prefetched into both levels; if both are null, nothing is.
//
// Written in assembler: GCC may move __builtin_prefetch before the check that the range exists, and a prefetch of an invalid
// address costs a walk through the page table.
class TwoLevelLines {
  public:
    TwoLevelLines(const char* far, const char* near, uint32_t bytes)
        : far_(far ? far : near), near_(near ? near : far), left_(near_ ? bytes : 0) {}

    // Prefetch `lines` lines of each range. The size must be divisible by them.
    template <uint32_t lines>
    void request() {
        if (left_ == 0) {
            return;
        }
#pragma GCC unroll 16
        for (uint32_t line = 0; line < lines; ++line) {
            __asm__ volatile("prfm pldl2keep, [%0]" : : "r"(far_ + line * cache_line));
            __asm__ volatile("prfm pldl1keep, [%0]" : : "r"(near_ + line * cache_line));
        }
        far_ += lines * cache_line;
        near_ += lines * cache_line;
        left_ -= lines * cache_line;
    }

    void request_all() {
        while (left_ != 0) {
            request<1>();
        }
    }

  private:
    const char* far_;
    const char* near_;
    uint64_t left_;  // bytes left of each range
};

}  // namespace
}  // namespace sglang_hybrid
