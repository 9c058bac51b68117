// Lines that are requested while a block is computed.
#pragma once

#include <stdint.h>

#include "attention/block_list.h"

namespace sglang_hybrid {
namespace {

// Two ranges of a block's size: a far one, from memory into the second-level cache, and a near one, from there into
// the first. In fp32 the first level (64 KiB on a Neoverse N1) has no room for a whole block ahead, and tiles that find
// their lines in the second level wait for them: 7.6 GB/s with one thread in fp32, 8.8 with both. Without address:
// nothing.
//
// In assembler, since GCC takes a prefetch for something that may be done before it is known to be wanted, and a
// request of what is no address costs a walk through the page table.
class TwoLevelLines {
  public:
    TwoLevelLines(const char* far, const char* near, uint32_t bytes)
        : far_(far ? far : near), near_(near ? near : far), left_(near_ ? bytes : 0) {}

    // So many lines of each, by which the size must be divisible.
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
    uint64_t left_;  // bytes of each
};

}  // namespace
}  // namespace sglang_hybrid
