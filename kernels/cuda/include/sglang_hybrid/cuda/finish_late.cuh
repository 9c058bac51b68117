// Attention with the real query over blocks that are read in place, from registered host memory: misses that the worker did
// not compute in time, or blocks of a whole row. PCIe limits the kernel, so all CTAs take part even if there is one row only.
#pragma once

#include "sglang_hybrid/cuda/entry_shares.cuh"
#include "sglang_hybrid/cuda/lanes_api.h"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

__device__ inline uint32_t blocks_of_tokens(uint32_t tokens) { return (tokens + block_tokens - 1) / block_tokens; }

// Return whether an entry attends to the blocks of its own row, served or not.
__device__ inline bool is_whole(const sh_finish_late& args, uint32_t entry) {
    return !args.pages || (args.whole && args.whole[entry]);
}

// The tokens that a (batch entry, KV head) pair attends to, and the blocks that they are in.
struct PoolList {
    const int32_t* pages;
    const int32_t* masks = nullptr;  // null: all tokens count
    const float* scores = nullptr;   // null: all blocks count
    const float* bias = nullptr;
    const uint32_t* held = nullptr;  // null: no block is held
    uint32_t tokens;

    __device__ PoolList(const sh_finish_late& args, uint32_t entry, uint32_t head) {
        const uint64_t pair = uint64_t{entry} * args.kv_heads + head;
        if (is_whole(args, entry)) {
            pages = args.step.page_table + uint64_t{entry} * args.step.max_blocks;
            tokens = min(static_cast<uint32_t>(max(args.step.lengths[entry], 0)), args.step.max_blocks * block_tokens);
            if (args.scores && args.step.row_of[entry] >= 0) {
                const uint64_t of_row = uint64_t{static_cast<uint32_t>(args.step.row_of[entry])} * args.kv_heads + head;
                scores = args.scores + of_row * args.step.max_blocks;
                if (args.bias) bias = args.bias + of_row * args.group;
            }
            if (args.held) held = args.held + pair * ((args.step.max_blocks + 31) / 32);
        } else {
            pages = args.pages + pair * args.most_blocks;
            if (args.masks) masks = args.masks + pair * args.most_blocks;
            tokens = min(static_cast<uint32_t>(max(args.counts[pair], 0)), args.most_blocks) * block_tokens;
        }
    }

    // Return the most blocks that a pair of an entry has: 0 if there is nothing to do, at least 1 if a result must be written.
    static __device__ uint32_t most_blocks(const sh_finish_late& args, uint32_t entry) {
        const bool whole = is_whole(args, entry), served = args.served && args.served[entry];
        if (served && !whole) return 0;
        uint32_t most = 1;
        for (uint32_t head = 0; head < (whole ? 1 : args.kv_heads); ++head) {
            most = max(most, blocks_of_tokens(PoolList(args, entry, head).tokens));
        }
        return most;
    }
};

// Iterates over the blocks of a warp. Lane i has the i-th of the next 32 blocks.
class PoolBlocks {
  public:
    struct Block {
        const char* keys;
        const char* values;
        uint32_t tokens;  // 0: there is no block left
        uint32_t mask;    // bit t: token t counts
        bool is_near;     // a sink, recent or tail block
    };

    // Iterate over every step-th block from `first` on, before `end`.
    __device__ PoolBlocks(const sh_finish_late& args, const PoolList& list, uint32_t head, uint32_t first, uint32_t step,
                          uint32_t end)
        : args_(args), list_(list), head_(head), end_(min(end, blocks_of_tokens(list.tokens))), next_(first), step_(step) {}

    __device__ Block take(uint32_t block_bytes) {
        while (!held_) {
            if (next_ >= end_) return {nullptr, nullptr, 0, 0, false};
            look();
        }
        const uint32_t lane = __ffs(held_) - 1;
        held_ &= held_ - 1;
        const uint64_t page = static_cast<uint32_t>(__shfl_sync(0xFFFFFFFF, page_, lane));
        const uint64_t at = (page * args_.kv_heads + head_) * block_bytes;
        const uint32_t tokens = min(block_tokens, list_.tokens - (base_ + lane * step_) * block_tokens);
        const uint32_t mask = __shfl_sync(0xFFFFFFFF, mask_, lane) & first_tokens(tokens);
        const bool is_near = is_always_in(base_ + lane * step_);
        return {static_cast<const char*>(args_.keys) + at, static_cast<const char*>(args_.values) + at, tokens, mask, is_near};
    }

  private:
    __device__ bool is_always_in(uint32_t place) const {
        return place < args_.sink || place + args_.recent + 1 >= blocks_of_tokens(list_.tokens);
    }

    __device__ bool counts(uint32_t place) const {
        if (place >= end_ || (list_.held && list_.held[place / 32] >> place % 32 & 1)) return false;
        return !list_.scores || list_.scores[place] >= args_.least_score || is_always_in(place);
    }

    __device__ void look() {
        const uint32_t place = next_ + threadIdx.x % warp_size * step_;
        page_ = counts(place) ? list_.pages[place] : -1;
        mask_ = place < end_ && list_.masks ? static_cast<uint32_t>(list_.masks[place]) : 0xFFFFFFFF;
        held_ = __ballot_sync(0xFFFFFFFF, page_ >= 0 && static_cast<uint32_t>(page_) < args_.pool_pages && mask_);
        base_ = next_;
        next_ += warp_size * step_;
    }

    const sh_finish_late& args_;
    const PoolList list_;
    const uint32_t head_, end_;
    uint32_t next_, base_ = 0;
    const uint32_t step_;
    uint32_t held_ = 0, mask_ = 0;
    int32_t page_ = -1;
};

// For EntryShares::finish: stores results in the dtype of the model, merged with the local partial if there is one.
template <class Element, int kDim>
struct FinishedResult {
    const sh_finish_late& args;
    uint64_t first;  // query head of the pair, counted over the batch
    bool has_local;

    __device__ void operator()(uint32_t i, uint32_t row, float4 quad, float lse) const {
        const uint64_t index = first * (kDim / 4) + i;
        Partial found{quad, lse};
        if (has_local) {
            found = merged({reinterpret_cast<const float4*>(args.local.out)[index], args.local.lse[first + row]}, found);
        }
        write_quad(args.out, index, found.out, model_dtype<Element>(static_cast<DType>(args.dtype)));
    }
    __device__ void operator()(uint32_t i, uint32_t row, float4 quad, const Union& all) const {
        (*this)(i, row, quad, all.lse());
    }
};

// With a worker, CTAs usually only find that all entries were served.
template <class Element, int kDim>
__global__ void __launch_bounds__(attend_warps* warp_size) finish_late(const __grid_constant__ sh_finish_late args) {
    extern __shared__ __align__(128) char shared[];
    constexpr uint32_t of_value = value_bytes<Element>;
    const SharedMemory at(kDim, blockDim.x / warp_size, of_value);
    const uint32_t batch = args.step.batch, longest = max(args.step.max_blocks, args.most_blocks);
    const EntryShares shares(batch, active_of(args.step.active_rows, batch), args.kv_heads, args.head_dim, of_value, args.group,
                             longest, shared + at.bytes, [&](uint32_t entry) { return PoolList::most_blocks(args, entry); });
    const uint32_t end = shares.begin(blockIdx.x + 1);
    for (uint32_t number = shares.begin(blockIdx.x); number < end;) {
        const EntryShares::Part part = shares.part_at(number);
        const uint32_t from = number - part.first, numbers = min(part.numbers - from, end - number);
        const uint64_t first = (uint64_t{part.entry} * args.kv_heads + part.head) * args.group;
        const PoolList list(args, part.entry, part.head);
        const auto* const query = static_cast<const char*>(args.query) + first * kDim * 2;
        const auto dtype = static_cast<DType>(args.dtype);
        const auto begin = [&](uint32_t warp, uint32_t of_warps) {
            return PoolBlocks(args, list, part.head, from + warp, of_warps, from + numbers);
        };
        attend_list<Element, kDim>(query, dtype, args.group, args.scale, list.bias, shared, at, begin);
        const bool has_local = args.local.out && (list.held || !is_whole(args, part.entry));
        shares.finish<kDim, of_value>(args, part, numbers, shared, at, FinishedResult<Element, kDim>{args, first, has_local});
        number += numbers;
        __syncthreads();  // shared memory is free for the next pair
    }
}

}  // namespace sglang_hybrid::cuda
