// Attention with the real query over blocks that are read where they lie, in registered host memory: misses that nobody
// computed in time, or all blocks of a row. Limited by PCIe, so it is `attend_slots` with another list and without sharing a
// list among CTAs.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"
#include "sglang_hybrid/cuda/lanes_api.h"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

// The blocks of a warp, one after the other. Lane i knows the i-th of the next 32.
class PoolBlocks {
  public:
    struct Block {
        const char* keys;
        const char* values;
        uint32_t tokens;  // 0: there is none left
    };

    __device__ PoolBlocks(const sh_finish_late& args, uint32_t pair, uint32_t first, uint32_t step)
        : args_(args), list_(args.pages + uint64_t{args.lengths ? pair / args.kv_heads : pair} * args.most_blocks),
          head_(pair % args.kv_heads), tokens_(tokens_of(args, pair)), end_((tokens_ + block_tokens - 1) / block_tokens),
          next_(first), step_(step) {}

    __device__ Block take(uint32_t block_bytes) {
        while (!held_) {
            if (next_ >= end_) return {nullptr, nullptr, 0};
            look();
        }
        const uint32_t lane = __ffs(held_) - 1;
        held_ &= held_ - 1;
        const uint64_t page = static_cast<uint32_t>(__shfl_sync(0xFFFFFFFF, page_, lane));
        const uint64_t at = (page * args_.kv_heads + head_) * block_bytes;
        const uint32_t tokens = min(block_tokens, tokens_ - (base_ + lane * step_) * block_tokens);
        return {static_cast<const char*>(args_.keys) + at, static_cast<const char*>(args_.values) + at, tokens};
    }

  private:
    static __device__ uint32_t tokens_of(const sh_finish_late& args, uint32_t pair) {
        const uint32_t most = args.most_blocks * block_tokens;
        if (args.lengths) return min(static_cast<uint32_t>(max(args.lengths[pair / args.kv_heads], 0)), most);
        return min(static_cast<uint32_t>(max(args.counts[pair], 0)), args.most_blocks) * block_tokens;
    }

    __device__ void look() {
        const uint32_t place = next_ + threadIdx.x % warp_size * step_;
        page_ = place < end_ ? list_[place] : -1;
        held_ = __ballot_sync(0xFFFFFFFF, page_ >= 0 && static_cast<uint32_t>(page_) < args_.pool_pages);
        base_ = next_;
        next_ += warp_size * step_;
    }

    const sh_finish_late& args_;
    const int32_t* const list_;
    const uint32_t head_, tokens_, end_;
    uint32_t next_, base_ = 0;
    const uint32_t step_;
    uint32_t held_ = 0;
    int32_t page_ = -1;
};

// CTAs take pairs in turn: behind a worker usually all they do is to see that everything was served, and then a CTA for each
// pair would take longer to start than to run.
template <class Element, int kDim>
__global__ void __launch_bounds__(attend_warps* warp_size) finish_late(const __grid_constant__ sh_finish_late args) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t warps = blockDim.x / warp_size, pairs = active_of(args.active_rows, args.batch) * args.kv_heads;
    const SharedMemory at(kDim, warps);
    for (uint32_t pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
        if (args.served && args.served[pair / args.kv_heads]) continue;
        const uint64_t first = uint64_t{pair} * args.group;
        const auto* const query = static_cast<const char*>(args.query) + first * kDim * 2;
        attend_list<Element, kDim>(query, args.group, args.scale, nullptr, shared, at,
                                   [&](uint32_t warp, uint32_t of) { return PoolBlocks(args, pair, warp, of); });
        merge_warps<kDim>(shared, at, warps, args.group, [&](uint32_t i, uint32_t row, float4 quad, const Union& all) {
            const uint64_t index = first * (kDim / 4) + i;
            Partial found{quad, all.lse()};
            if (args.local.out) {
                const auto* const local = reinterpret_cast<const float4*>(args.local.out);
                found = merged({local[index], args.local.lse[first + row]}, found);
            }
            write_quad(args.out, index, found.out, static_cast<DType>(args.dtype));
        });
        __syncthreads();  // shared memory is free for the next pair
    }
}

}  // namespace sglang_hybrid::cuda
