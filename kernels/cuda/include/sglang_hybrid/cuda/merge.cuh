// Merges two partial attentions into one, in the model's dtype.
#pragma once

#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t merge_threads = 256;

// One thread merges four channels of one head.
__global__ void __launch_bounds__(merge_threads) merge_sides(const __grid_constant__ sh_merge args) {
    const uint32_t quads = args.head_dim / 4;
    const uint64_t index = uint64_t{blockIdx.x} * merge_threads + threadIdx.x;
    const uint64_t head = index / quads;
    if (head >= uint64_t{active_of(args.active_rows, args.batch)} * args.heads) return;

    const auto side = [&](const sh_side& from) -> Partial {
        return {reinterpret_cast<const float4*>(from.out)[index], from.lse[head]};
    };
    const Partial all = merged(side(args.first), side(args.second));
    write_quad(args.out, index, all.out, static_cast<DType>(args.dtype));
    if (args.lse && index % quads == 0) args.lse[head] = all.lse;
}

}  // namespace sglang_hybrid::cuda
