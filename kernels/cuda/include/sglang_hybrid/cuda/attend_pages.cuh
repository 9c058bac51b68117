// Attention of one token over all blocks of its row, which are in device memory as pages. The warps are those of
// attend_slots.cuh; what is different is that rows are as long as they are, so that every CTA first adds up their lengths.
// With few rows a launch is mostly latency, so whatever can be asked for at the same time is.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"
#include "sglang_hybrid/cuda/dense_api.h"

namespace sglang_hybrid::cuda {

// At most, of a CTA. One CTA that fills a processor leaves fewer partial results than two that share it.
inline constexpr uint32_t page_warps = 8;

// The blocks of all (batch entry, KV head) pairs as one long list, of which every CTA gets an equal part. A CTA that goes on from
// one pair to the next begins anew there, so if there are CTAs for that each has blocks of one pair only: pairs are as long
// then as a whole number of CTAs takes.
class PageShares {
  public:
    static constexpr uint32_t least_blocks = 2;  // of a warp

    // In shared memory.
    static __host__ __device__ uint32_t bytes(uint32_t batch) { return (3 * batch + 1) * sizeof(uint32_t); }

    // By a whole CTA. An entry without tokens counts as one block, for the results' sake.
    __device__ PageShares(const sh_attend_pages& args, char* shared)
        : ends_(reinterpret_cast<uint32_t*>(shared)), rows_(reinterpret_cast<int32_t*>(ends_ + args.step.batch)),
          lengths_(rows_ + args.step.batch), heads_(args.kv_heads) {
        const uint32_t active = active_of(args.step.active_rows, args.step.batch);
        uint32_t& share = reinterpret_cast<uint32_t*>(shared)[3 * args.step.batch];
        if (threadIdx.x < warp_size) {
            // not too little: what CTAs have of a pair has to be merged, and there must be room for all of that
            const uint32_t warps = blockDim.x / warp_size, parts = most_parts(args.head_dim, warps, args.group) - 2;
            const uint32_t least = max(least_blocks * warps, args.table.max_blocks / parts + 1);
            uint32_t sum = 0, base = 0, blocks = 0;
            do {  // what is read does not depend on the number of active rows
                const uint32_t entry = base + threadIdx.x;
                const bool is_there = entry < args.step.batch;
                const int32_t length = is_there ? args.step.lengths[entry] : 0, row = is_there ? args.step.row_of[entry] : -1;
                blocks = entry < active ? blocks_of(args, length) : 0;
                const uint32_t before = sum_up_to_lane(blocks);
                if (is_there) ends_[entry] = sum + before, rows_[entry] = row, lengths_[entry] = length;
                sum += __shfl_sync(0xFFFFFFFF, before, warp_size - 1);
                base += warp_size;
            } while (base < active);
            uint32_t found = max(least, (sum * heads_ + gridDim.x - 1) / gridDim.x);
            if (active <= warp_size) {
                constexpr uint32_t tries = 4;
                uint32_t longer = found;
                for (uint32_t i = 0; i < tries; ++i, longer += found / 8 + 1) {
                    const uint32_t of_pair = (blocks + longer - 1) / longer, ctas = sum_up_to_lane(of_pair);
                    if (__shfl_sync(0xFFFFFFFF, ctas, warp_size - 1) * heads_ > gridDim.x) continue;
                    if (threadIdx.x < active) ends_[threadIdx.x] = ctas * longer;
                    found = longer;
                    break;
                }
            }
            if (threadIdx.x == 0) share = found;
        }
        __syncthreads();
        total_ = active ? ends_[active - 1] * heads_ : 0;
        share_ = share;
        active_ = active;
    }

    static __device__ uint32_t blocks_of(const sh_attend_pages& args, int32_t length) {
        const int32_t blocks = (length + static_cast<int32_t>(block_tokens) - 1) / static_cast<int32_t>(block_tokens);
        return static_cast<uint32_t>(min(max(blocks, 1), static_cast<int32_t>(args.table.max_blocks)));
    }

    __device__ uint32_t begin(uint32_t cta) const {
        return static_cast<uint32_t>(min(uint64_t{cta} * share_, uint64_t{total_}));
    }

    struct Part {
        uint32_t entry, head, first, numbers;  // of the pair: the first in the list, and how many
        int32_t row, length;
    };
    __device__ Part part_at(uint32_t number) const {
        uint32_t low = 0, high = active_ - 1;
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (number < ends_[middle] * heads_) high = middle;
            else low = middle + 1;
        }
        const uint32_t before = low ? ends_[low - 1] : 0, numbers = ends_[low] - before;
        const uint32_t head = (number - before * heads_) / numbers;
        return {low, head, before * heads_ + head * numbers, numbers, rows_[low], lengths_[low]};
    }
    __device__ uint32_t first_cta(const Part& part) const { return part.first / share_; }
    __device__ uint32_t last_cta(const Part& part) const { return (part.first + part.numbers - 1) / share_; }

  private:
    static __device__ uint32_t sum_up_to_lane(uint32_t sum) {
#pragma unroll
        for (uint32_t step = 1; step < warp_size; step *= 2) {
            const uint32_t before = __shfl_up_sync(0xFFFFFFFF, sum, step);
            if (threadIdx.x >= step) sum += before;
        }
        return sum;
    }

    uint32_t* const ends_;  // [batch]: numbers of a KV head up to and with this entry
    int32_t* const rows_;   // [batch]
    int32_t* const lengths_;
    const uint32_t heads_;
    uint32_t total_, share_, active_;
};

// The blocks of a warp, one after the other. Lane i knows the page of the i-th of the next 32.
class WarpPages {
  public:
    using Slot = WarpSlots::Slot;

    // The first `held` blocks of the row have pages. That is looked at last: it comes from memory like the pages.
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
            if (behind <= static_cast<int32_t>(block_tokens)) wait_for_launch_before();  // the step's token is in this block
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

// Results in the dtype of the model.
template <class Element>
struct RoundedResult {
    uint32_t* out;  // [group][kDim] of 16 bits

    __device__ void operator()(uint32_t i, uint32_t, float4 quad, float) const {
        reinterpret_cast<uint2*>(out)[i] = make_uint2(Element::pack(quad.x, quad.y), Element::pack(quad.z, quad.w));
    }
    __device__ void operator()(uint32_t i, uint32_t row, float4 quad, const Union&) const { (*this)(i, row, quad, 0.0f); }
};

template <class Element, int kDim>
__global__ void __launch_bounds__(page_warps* warp_size) attend_pages(const __grid_constant__ sh_attend_pages args) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t warps = blockDim.x / warp_size;
    const SharedMemory at(kDim, warps);
    const PageShares shares(args, shared + at.bytes);
    const uint32_t end = shares.begin(blockIdx.x + 1);

    for (uint32_t number = shares.begin(blockIdx.x); number < end;) {
        const PageShares::Part part = shares.part_at(number);
        const uint32_t from = number - part.first, numbers = min(part.numbers - from, end - number);
        const uint32_t to = min(from + numbers, PageShares::blocks_of(args, part.length));
        const uint32_t pair = part.entry * args.kv_heads + part.head;
        const bool exists = part.row >= 0 && static_cast<uint32_t>(part.row) < args.table.rows;
        const auto* const query = static_cast<const char*>(args.query) + uint64_t{pair} * args.group * kDim * 2;
        attend_list<Element, kDim>(query, args.group, args.scale, nullptr, shared, at, [&](uint32_t warp, uint32_t of_warps) {
            const uint32_t row = exists ? static_cast<uint32_t>(part.row) : 0;
            const int32_t* const pages = args.table.pages + uint64_t{row} * args.table.max_blocks;
            const int32_t held = exists ? args.table.held[row] : 0;
            return WarpPages(args, pages, held, part.head, part.length, from + warp, of_warps, to);
        });

        const RoundedResult<Element> result{static_cast<uint32_t*>(args.out) + uint64_t{pair} * args.group * kDim / 2};
        if (numbers == part.numbers) {
            merge_warps<kDim>(shared, at, warps, args.group, result);
        } else {
            // a CTA has at most two partial results: of the pair that it begins with, and of one that it leaves to the next
            const uint32_t first = shares.first_cta(part), ctas = shares.last_cta(part) - first + 1;
            const auto place = [&](uint32_t cta) { return uint64_t{2} * cta + (cta == first); };
            const uint64_t mine = place(blockIdx.x);
            merge_warps<kDim>(
                shared, at, warps, args.group,
                PartialResult<kDim>{args.partial_out + mine * args.group * kDim, args.partial_lse + mine * args.group});
            // the tiles are free by now
            if (is_last(args.arrived[pair], ctas)) {
                merge_ctas<kDim>(
                    args.partial_out, args.partial_lse, args.group, ctas, [&](uint32_t i) { return place(first + i); },
                    shared + at.tiles, result);
            }
        }
        number += numbers;
        __syncthreads();  // shared memory is free for the next pair
    }
    wait_for_launch_before();  // for CTAs that had nothing to do: who comes next waits for this launch only
}

}  // namespace sglang_hybrid::cuda
