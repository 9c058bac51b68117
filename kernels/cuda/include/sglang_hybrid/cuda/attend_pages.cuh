// Attention of one token over all blocks of its row, which are in device memory as pages. The warps are those of
// attend_slots.cuh. But rows have different lengths here, so every CTA first adds up the lengths. With few rows a launch is
// mostly latency, so all loads that can be in flight at the same time are.
#pragma once

#include "sglang_hybrid/cuda/dense_api.h"
#include "sglang_hybrid/cuda/entry_shares.cuh"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

// Most warps of a CTA. One CTA that fills a processor leaves fewer partial results than two CTAs that share it. With 16-bit
// values the tiles fill its shared memory, with FP8 the warps fill its registers.
template <class Element>
inline constexpr uint32_t page_warps = value_bytes<Element> == 1 ? 12 : 8;

__device__ inline uint32_t page_blocks_of(const sh_attend_pages& args, int32_t length) {
    const int32_t blocks = (length + static_cast<int32_t>(block_tokens) - 1) / static_cast<int32_t>(block_tokens);
    return static_cast<uint32_t>(min(max(blocks, 1), static_cast<int32_t>(args.table.max_blocks)));
}

// Rows and lengths of a step in shared memory: EntryShares needs them first, so they are kept instead of loaded twice.
struct PageRows {
    int32_t* rows;  // [batch] each, in shared memory
    int32_t* lengths;

    static __host__ __device__ uint32_t bytes(uint32_t batch) { return 2 * batch * sizeof(int32_t); }

    __device__ PageRows(char* shared, uint32_t batch) : rows(reinterpret_cast<int32_t*>(shared)), lengths(rows + batch) {}

    // Keep row and length of an entry, and return its blocks: one for an entry without tokens, whose result is written, too.
    __device__ uint32_t note(const sh_attend_pages& args, uint32_t entry) const {
        const int32_t length = args.step.lengths[entry];
        rows[entry] = args.step.row_of[entry], lengths[entry] = length;
        return page_blocks_of(args, length);
    }
};

// Iterates over the blocks of a warp. Lane i has the page of the i-th of the next 32 blocks.
class WarpPages {
  public:
    using Slot = WarpSlots::Slot;

    // The first `held` blocks of the row have pages. `held` is used last: it is loaded from memory like the pages.
    __device__ WarpPages(const sh_attend_pages& args, const int32_t* pages, int32_t held, uint32_t head, int32_t length,
                         uint32_t first, uint32_t step, uint32_t end)
        : args_(args), pages_(pages), held_(held), length_(length), head_(head), next_(first), step_(step), end_(end) {}

    __device__ Slot take(uint32_t block_bytes) {
        while (next_ < end_) {
            const uint32_t lane = taken_++ % warp_size;
            if (lane == 0) {
                const uint32_t block = next_ + threadIdx.x % warp_size * step_;
                page_ = block < end_ ? pages_[block] : -1;
            }
            const int32_t page = __shfl_sync(0xFFFFFFFF, page_, lane);
            const int32_t behind = length_ - static_cast<int32_t>(next_ * block_tokens);
            const bool is_held = static_cast<int32_t>(next_) < held_;
            next_ += step_;
            if (page < 0 || static_cast<uint32_t>(page) >= args_.table.device_pages || behind <= 0 || !is_held) continue;
            if (behind <= static_cast<int32_t>(block_tokens)) wait_for_launch_before();  // this block has the step's token
            const uint64_t at = (uint64_t{static_cast<uint32_t>(page)} * args_.kv_heads + head_) * block_bytes;
            const auto tokens = static_cast<uint32_t>(min(behind, static_cast<int32_t>(block_tokens)));
            return {static_cast<const char*>(args_.keys) + at, static_cast<const char*>(args_.values) + at, tokens};
        }
        return {nullptr, nullptr, 0};
    }

  private:
    const sh_attend_pages& args_;
    const int32_t* const pages_;
    const int32_t held_, length_;
    const uint32_t head_;
    uint32_t next_, taken_ = 0;
    const uint32_t step_, end_;
    int32_t page_ = -1;
};

// For merge_warps and merge_ctas: stores results in the dtype of the model.
template <class Element>
struct RoundedResult {
    uint32_t* out;  // [group][kDim] of 16 bits
    DType dtype;    // of pool and queries

    __device__ void operator()(uint32_t i, uint32_t, float4 quad, float) const {
        if constexpr (value_bytes<Element> == 1) write_quad(out, i, quad, model_dtype<Element>(dtype));
        else reinterpret_cast<uint2*>(out)[i] = make_uint2(Element::pack(quad.x, quad.y), Element::pack(quad.z, quad.w));
    }
    __device__ void operator()(uint32_t i, uint32_t row, float4 quad, const Union&) const { (*this)(i, row, quad, 0.0f); }
};

template <class Element, int kDim>
__global__ void __launch_bounds__(page_warps<Element>* warp_size) attend_pages(const __grid_constant__ sh_attend_pages args) {
    extern __shared__ __align__(128) char shared[];
    constexpr uint32_t of_value = value_bytes<Element>;
    const SharedMemory at(kDim, blockDim.x / warp_size, of_value);
    const uint32_t batch = args.step.batch;
    const PageRows rows(shared + at.bytes + EntryShares::bytes(batch), batch);
    const EntryShares shares(batch, active_of(args.step.active_rows, batch), args.kv_heads, args.head_dim, of_value, args.group,
                             args.table.max_blocks, shared + at.bytes, [&](uint32_t entry) { return rows.note(args, entry); });
    const uint32_t end = shares.begin(blockIdx.x + 1);

    for (uint32_t number = shares.begin(blockIdx.x); number < end;) {
        const EntryShares::Part part = shares.part_at(number);
        const uint32_t from = number - part.first, numbers = min(part.numbers - from, end - number);
        const int32_t length = rows.lengths[part.entry], row_index = rows.rows[part.entry];
        const uint32_t to = min(from + numbers, page_blocks_of(args, length));
        const uint32_t pair = part.entry * args.kv_heads + part.head;
        const bool exists = row_index >= 0 && static_cast<uint32_t>(row_index) < args.table.rows;
        const auto* const query = static_cast<const char*>(args.query) + uint64_t{pair} * args.group * kDim * 2;
        const auto dtype = static_cast<DType>(args.dtype);
        const auto begin = [&](uint32_t warp, uint32_t of_warps) {
            const uint32_t row = exists ? static_cast<uint32_t>(row_index) : 0;
            const int32_t* const pages = args.table.pages + uint64_t{row} * args.table.max_blocks;
            const int32_t held = exists ? args.table.held[row] : 0;
            return WarpPages(args, pages, held, part.head, length, from + warp, of_warps, to);
        };
        attend_list<Element, kDim>(query, dtype, args.group, args.scale, nullptr, shared, at, begin);
        auto* const out = static_cast<uint32_t*>(args.out) + uint64_t{pair} * args.group * kDim / 2;
        shares.finish<kDim, of_value>(args, part, numbers, shared, at, RoundedResult<Element>{out, dtype});
        number += numbers;
        __syncthreads();  // shared memory is free for the next pair
    }
    wait_for_launch_before();  // for CTAs that had nothing to do: the next launch waits for this launch only
}

}  // namespace sglang_hybrid::cuda
