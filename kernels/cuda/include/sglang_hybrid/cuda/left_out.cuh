// Adds the mean of a row's values to its attention, for the blocks that are left out: `with_left_out` of the reference.
#pragma once

#include "sglang_hybrid/cuda/left_out_api.h"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

// Return four channels (`quad` of `quads`) of query head `head`, counted over the batch of `heads` query heads an entry.
__device__ inline float4 with_left_out(const sh_left_out& args, uint64_t head, uint32_t heads, uint32_t quad, uint32_t quads,
                                       const Partial& all) {
    if (!args.near_lse || all.lse == -INFINITY) return all.out;
    const uint64_t entry = head / heads, of_entry = head % heads;
    const int32_t row = args.row_of[entry];
    if (row < 0 || static_cast<uint32_t>(row) >= args.rows) return all.out;
    const uint64_t in_row = static_cast<uint32_t>(row) * uint64_t{heads} + of_entry;
    // the share of near blocks is what is not the candidates'
    const float candidates = fminf(fmaxf(1.0f - expf(args.near_lse[head] - all.lse), 0.0f), 1.0f);
    const float weight = args.weights[in_row] * candidates, part = 1.0f / (1.0f + weight);
    if (!(weight > 0)) return all.out;  // whatever the mean is
    const float4 mean = reinterpret_cast<const float4*>(args.means)[in_row / args.group * quads + quad];
    const auto both = [&](float x, float y) { return (x + weight * y) * part; };
    return make_float4(both(all.out.x, mean.x), both(all.out.y, mean.y), both(all.out.z, mean.z), both(all.out.w, mean.w));
}

}  // namespace sglang_hybrid::cuda
