// Marks the fewest entries of each list that have a share of its weights: `cumulative_share` of the reference.
#pragma once

#include "sglang_hybrid/cuda/weight_share.cuh"
#include "sglang_hybrid/cuda/weights_api.h"

namespace sglang_hybrid::cuda {

// A CTA for each list.
__global__ void __launch_bounds__(share_threads) cumulative_share(const __grid_constant__ sh_cumulative_share args) {
    const uint64_t begin = uint64_t{blockIdx.x} * args.entries;
    const float* const weights = args.weights + begin;
    auto* const kept = static_cast<uint8_t*>(args.kept) + begin;
    const auto weight_of = [&](uint32_t i) { return weights[i]; };
    const uint32_t largest = largest_bits(args.entries, weight_of);
    const bool everything = args.least >= 1 || largest == 0;
    const Share share = everything ? whole_share() : find_share(args.entries, weight_of, largest, args.least);
    for_each_entry(args.entries, weight_of, share, [&](uint32_t i, float, bool is_kept) { kept[i] = is_kept; });
}

}  // namespace sglang_hybrid::cuda
