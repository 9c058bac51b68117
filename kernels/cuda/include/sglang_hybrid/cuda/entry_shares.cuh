// Division of blocks among CTAs where batch entries have different numbers of blocks.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"

namespace sglang_hybrid::cuda {

// The blocks of all (batch entry, KV head) pairs are one long list, of which every CTA gets an equal part. A CTA that goes on
// from one pair to the next has to begin anew there. So, if there are enough CTAs, each has blocks of one pair only: pairs are
// then padded in the list to a whole number of CTAs' parts.
class EntryShares {
  public:
    static constexpr uint32_t least_blocks = 2;  // fewest blocks of a warp

    // Bytes of shared memory.
    static __host__ __device__ uint32_t bytes(uint32_t batch) { return (batch + 1) * sizeof(uint32_t); }

    // blocks_of(entry): number of blocks of each of its pairs, for all entries of the batch; those of entries that are not
    // active do not count. Pairs have at most `longest` blocks. `of_value`: bytes of a number in keys and values. Called by a
    // whole CTA.
    template <class BlocksOf>
    __device__ EntryShares(uint32_t batch, uint32_t active, uint32_t heads, uint32_t head_dim, uint32_t of_value,
                           uint32_t group, uint32_t longest, char* shared, BlocksOf blocks_of)
        : ends_(reinterpret_cast<uint32_t*>(shared)), heads_(heads), active_(active) {
        uint32_t& share = ends_[batch];
        if (threadIdx.x < warp_size) {
            // parts must not be too short: the partial results of a pair have to be merged, and must fit shared memory together
            const uint32_t warps = blockDim.x / warp_size, parts = most_parts(head_dim, of_value, warps, group) - 2;
            const uint32_t least = max(least_blocks * warps, longest / parts + 1);
            uint32_t sum = 0, base = 0, blocks = 0;
            do {  // what is read does not depend on the number of active rows
                const uint32_t entry = base + threadIdx.x;
                const uint32_t found = entry < batch ? blocks_of(entry) : 0;
                blocks = entry < active ? found : 0;
                const uint32_t before = sum_up_to_lane(blocks);
                if (entry < batch) ends_[entry] = sum + before;
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
    }

    // Return where the part of a CTA begins in the list.
    __device__ uint32_t begin(uint32_t cta) const {
        return static_cast<uint32_t>(min(uint64_t{cta} * share_, uint64_t{total_}));
    }

    struct Part {
        uint32_t entry, head, first, numbers;  // of the pair: its first number in the list, and how many; at least its blocks
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
        return {low, head, before * heads_ + head * numbers, numbers};
    }

    // Finish a CTA's part of a pair, `numbers` of its numbers: store the result if the part is all of the pair; otherwise the
    // CTA that finishes last merges and stores the partial results of all of them. `store` is as for merge_warps and
    // merge_ctas.
    template <int kDim, uint32_t kBytes, class Args, class Store>
    __device__ void finish(const Args& args, const Part& part, uint32_t numbers, char* shared, const SharedMemory& at,
                           Store store) const {
        const uint32_t warps = blockDim.x / warp_size, pair = part.entry * heads_ + part.head;
        if (numbers == part.numbers) return merge_warps<kDim, kBytes>(shared, at, warps, args.group, store);
        // a CTA has at most two partial results: of the pair that it begins with, and of one that it leaves to the next
        const uint32_t first = part.first / share_, last = (part.first + part.numbers - 1) / share_, ctas = last - first + 1;
        const auto place = [&](uint32_t cta) { return uint64_t{2} * cta + (cta == first); };
        const uint64_t mine = place(blockIdx.x);
        merge_warps<kDim, kBytes>(
            shared, at, warps, args.group,
            PartialResult<kDim>{args.partial_out + mine * args.group * kDim, args.partial_lse + mine * args.group});
        // the tiles are free by now
        if (is_last(args.arrived[pair], ctas)) {
            merge_ctas<kDim>(
                args.partial_out, args.partial_lse, args.group, ctas, [&](uint32_t i) { return place(first + i); },
                shared + at.tiles, store);
        }
    }

  private:
    static __device__ uint32_t sum_up_to_lane(uint32_t sum) {
#pragma unroll
        for (uint32_t step = 1; step < warp_size; step *= 2) {
            const uint32_t before = __shfl_up_sync(0xFFFFFFFF, sum, step);
            if (threadIdx.x >= step) sum += before;
        }
        return sum;
    }

    uint32_t* const ends_;  // [batch]: numbers of a KV head up to and with this entry; behind them, the length of a CTA's part
    const uint32_t heads_, active_;
    uint32_t total_, share_;
};

}  // namespace sglang_hybrid::cuda
