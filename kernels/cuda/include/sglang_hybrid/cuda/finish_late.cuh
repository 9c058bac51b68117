// Attention over misses that nobody computed in time, with the real query: blocks are read where they lie, in registered
// host memory. Rare, and limited by PCIe, so it is `attend_slots` with another list and without sharing a list among CTAs.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"
#include "sglang_hybrid/cuda/lanes_api.h"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

// The blocks of a warp, one after the other. Lane i knows the i-th of the next 32.
class MissedBlocks {
  public:
    struct Block {
        const char* keys;
        const char* values;
        uint32_t tokens;  // 0: there is none left
    };

    __device__ MissedBlocks(const sh_finish_late& args, uint32_t pair, uint32_t first, uint32_t step)
        : args_(args), list_(args.pages + uint64_t{pair} * args.most_misses), head_(pair % args.kv_heads),
          end_(min(max(args.counts[pair], 0), static_cast<int32_t>(args.most_misses))), next_(first), step_(step) {}

    __device__ Block take(uint32_t block_bytes) {
        while (!held_) {
            if (next_ >= end_) return {nullptr, nullptr, 0};
            look();
        }
        const uint32_t lane = __ffs(held_) - 1;
        held_ &= held_ - 1;
        const uint64_t page = static_cast<uint32_t>(__shfl_sync(0xFFFFFFFF, page_, lane));
        const uint64_t at = (page * args_.kv_heads + head_) * block_bytes;
        return {static_cast<const char*>(args_.keys) + at, static_cast<const char*>(args_.values) + at, block_tokens};
    }

  private:
    __device__ void look() {
        const uint32_t place = next_ + threadIdx.x % warp_size * step_;
        page_ = place < end_ ? list_[place] : -1;
        held_ = __ballot_sync(0xFFFFFFFF, page_ >= 0 && static_cast<uint32_t>(page_) < args_.pool_pages);
        next_ += warp_size * step_;
    }

    const sh_finish_late& args_;
    const int32_t* const list_;
    const uint32_t head_, end_;
    uint32_t next_;
    const uint32_t step_;
    uint32_t held_ = 0;
    int32_t page_ = -1;
};

// CTAs take pairs in turn: usually all they do is to see that everything was served, and then a CTA for each pair would
// take longer to start than to run.
template <class Element, int kDim>
__global__ void __launch_bounds__(attend_warps* warp_size) finish_late(const __grid_constant__ sh_finish_late args) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t warps = blockDim.x / warp_size, pairs = active_of(args.active_rows, args.batch) * args.kv_heads;
    const SharedMemory at(kDim, warps);
    for (uint32_t pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
        if (args.served[pair / args.kv_heads]) continue;
        const uint64_t first = uint64_t{pair} * args.group;
        const auto* const query = static_cast<const char*>(args.query) + first * kDim * 2;
        attend_list<Element, kDim>(query, args.group, args.scale, shared, at, [&](uint32_t warp, uint32_t of) {
            return MissedBlocks(args, pair, warp, of);
        });
        merge_warps<kDim>(shared, at, warps, args.group, [&](uint32_t i, uint32_t row, float4 quad, const Union& all) {
            const uint64_t index = first * (kDim / 4) + i;
            const Partial local{reinterpret_cast<const float4*>(args.local.out)[index], args.local.lse[first + row]};
            write_quad(args.out, index, merged(local, {quad, all.lse()}).out, static_cast<DType>(args.dtype));
        });
        __syncthreads();  // shared memory is free for the next pair
    }
}

}  // namespace sglang_hybrid::cuda
