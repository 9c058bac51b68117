// Attention over blocks in which only the tokens of a mask count.
//
// No variant's attention kernel knows masks. Blocks in which every token counts are passed to the kernel in place. From other
// blocks, the tokens that count are copied together into whole blocks in scratch memory, which are passed instead. So masks
// work with all variants; fewer tokens mean less to read and compute; and values between the tokens (NaN, say) cannot affect
// results.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t cache_line = 64;
constexpr uint32_t scratch_bytes = 64 * 1024;  // of keys, and of values: both stay in the second-level cache until used
constexpr uint32_t most_scratch_blocks = scratch_bytes / (block_tokens * 64);  // of the smallest head_dim, in FP8
constexpr uint32_t most_whole_blocks = 64;  // passed to one call of the kernel

// Return a mask of a block's first `tokens` tokens.
uint32_t first_tokens(uint32_t tokens) { return tokens == block_tokens ? ~0u : (1u << tokens) - 1; }

// Return a mask of the tokens that block `index` of the list has.
uint32_t filled(const BlockAttention& work, uint32_t index) {
    return first_tokens(index + 1 == work.count ? work.last_fill : block_tokens);
}

// Call body(first token, number of tokens) for every run of tokens that count.
template <class Body>
void each_run(uint32_t counted, Body body) {
    for (uint32_t token = 0; counted != 0;) {
        const auto skipped = static_cast<uint32_t>(std::countr_zero(counted));
        const auto tokens = static_cast<uint32_t>(std::countr_one(counted >> skipped));
        body(token + skipped, tokens);
        token += skipped + tokens;
        counted = token == block_tokens ? 0 : counted >> skipped >> tokens;
    }
}

class MaskedAttention {
  public:
    MaskedAttention(Kernel kernel, const BlockAttention& work)
        : kernel_(kernel), work_(work), row_bytes_(work.head_dim * bytes_of(work.dtype)),
          most_tokens_(scratch_bytes / row_bytes_ / block_tokens * block_tokens) {}

    void attend() {
        for (uint32_t index = 0; index < work_.count; ++index) {
            const uint32_t tokens = filled(work_, index), counted = work_.masks[index] & tokens;
            request_rows(index + 1);
            if (counted == tokens) {
                add_whole_block(index);
            } else if (counted != 0) {
                add_tokens(index, counted);
            }
        }
        attend_whole_blocks();
        attend_tokens();
        if (is_empty_) std::fill_n(work_.lse, work_.group, -std::numeric_limits<float>::infinity());
    }

  private:
    void add_whole_block(uint32_t index) {
        whole_[whole_count_++] = work_.pages[index];
        whole_fill_ = index + 1 == work_.count ? work_.last_fill : block_tokens;
        if (whole_count_ == most_whole_blocks) attend_whole_blocks();
    }

    void add_tokens(uint32_t index, uint32_t counted) {
        if (tokens_ + block_tokens > most_tokens_) attend_tokens();
        const uint64_t offset = work_.pages[index] * work_.page_stride;
        each_run(counted, [&](uint32_t first, uint32_t tokens) {
            const uint64_t from = offset + uint64_t{first} * row_bytes_;
            std::memcpy(keys_ + tokens_ * row_bytes_, work_.keys + from, tokens * row_bytes_);
            std::memcpy(values_ + tokens_ * row_bytes_, work_.values + from, tokens * row_bytes_);
            tokens_ += tokens;
        });
    }

    // Prefetch the rows of block `index` that will be copied, during the copy of the block before. Blocks have random
    // addresses, so the hardware does not prefetch them.
    void request_rows(uint32_t index) const {
        if (index >= work_.count) return;
        const uint32_t tokens = filled(work_, index), counted = work_.masks[index] & tokens;
        if (counted == tokens) return;  // the kernel prefetches the block
        const uint64_t offset = work_.pages[index] * work_.page_stride;
        each_run(counted, [&](uint32_t first, uint32_t run) {
            const uint64_t from = offset + uint64_t{first} * row_bytes_;
            for (uint32_t at = 0; at < run * row_bytes_; at += cache_line) {
                __builtin_prefetch(work_.keys + from + at);
                __builtin_prefetch(work_.values + from + at);
            }
        });
    }

    void attend_whole_blocks() {
        if (whole_count_ == 0) return;
        BlockAttention part = work_;
        part.pages = whole_;
        part.count = whole_count_;
        part.last_fill = whole_fill_;
        add(part);
        whole_count_ = 0;
    }

    void attend_tokens() {
        if (tokens_ == 0) return;
        uint32_t pages[most_scratch_blocks];
        std::iota(pages, pages + most_scratch_blocks, 0u);
        BlockAttention part = work_;
        part.keys = keys_;
        part.values = values_;
        part.page_stride = block_tokens * row_bytes_;
        part.pages = pages;
        part.count = (tokens_ + block_tokens - 1) / block_tokens;
        part.last_fill = tokens_ - (part.count - 1) * block_tokens;
        add(part);
        tokens_ = 0;
    }

    // Compute the attention over a part of the blocks, and merge it with the result so far.
    void add(BlockAttention& part) {
        part.masks = nullptr;
        part.next = nullptr;
        if (is_empty_) {
            is_empty_ = false;
            return kernel_(part);
        }
        float lse[max_group];
        part.out = out_;
        part.lse = lse;
        kernel_(part);
        for (uint32_t head = 0; head < work_.group; ++head) {
            merge(work_.out + head * work_.head_dim, work_.lse[head], out_ + head * work_.head_dim, lse[head]);
        }
    }

    void merge(float* out, float& lse, const float* part, float part_lse) const {
        constexpr float nothing = -std::numeric_limits<float>::infinity();
        if (part_lse == nothing) return;  // all logits are -inf: there is no output
        const float largest = std::max(lse, part_lse);
        const float before = lse == nothing ? 0.0f : std::exp(lse - largest), weight = std::exp(part_lse - largest);
        const float sum = before + weight, old_share = before / sum, share = weight / sum;
        for (uint32_t d = 0; d < work_.head_dim; ++d) {
            out[d] = (lse == nothing ? 0.0f : old_share * out[d]) + share * part[d];
        }
        lse = largest + std::log(sum);
    }

    const Kernel kernel_;
    const BlockAttention& work_;
    const uint32_t row_bytes_;
    const uint32_t most_tokens_;
    bool is_empty_ = true;  // no part was attended yet
    uint32_t whole_[most_whole_blocks];
    uint32_t whole_count_ = 0;
    uint32_t whole_fill_ = block_tokens;  // tokens of the last whole block
    uint32_t tokens_ = 0;                 // number of tokens in the scratch memory
    alignas(64) char keys_[scratch_bytes];
    alignas(64) char values_[scratch_bytes];
    alignas(64) float out_[max_group * max_head_dim];
};

// Not inlined, so that calls without masks do not touch the stack pages of this function's scratch memory.
__attribute__((noinline)) void attend_masked(Kernel kernel, const BlockAttention& work) {
    MaskedAttention(kernel, work).attend();
}

}  // namespace

void attend(Kernel kernel, const BlockAttention& work) {
    if (work.masks) return attend_masked(kernel, work);
    kernel(work);
}

}  // namespace sglang_hybrid
