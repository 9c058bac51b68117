// Moving averages of attention weights of the tokens in slots: `move_averages` of the reference, by a second pass over the
// keys.
#pragma once

#include "sglang_hybrid/cuda/block_logits.cuh"
#include "sglang_hybrid/cuda/salience_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t average_slots = 16;  // slots of a CTA

// A CTA for each (batch entry, KV head) and `average_slots` of its slots.
template <class Element, int kDim>
__global__ void __launch_bounds__(logit_warps* warp_size) move_averages(const __grid_constant__ sh_move_averages args) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t parts = (args.slots + average_slots - 1) / average_slots;
    const uint32_t pair = blockIdx.x / parts, first = blockIdx.x % parts * average_slots;
    const uint32_t entry = pair / args.kv_heads, head = pair % args.kv_heads;
    if (entry >= active_of(args.active_rows, args.batch)) return;
    const int32_t row = args.row_of[entry];
    if (row < 0 || static_cast<uint32_t>(row) >= args.rows) return;
    const int64_t length = args.lengths[row];
    const uint64_t slots = (uint64_t{static_cast<uint32_t>(row)} * args.kv_heads + head) * args.slots + first;
    const auto position_of = [&](uint32_t i) { return int64_t{args.positions[slots + i]}; };
    const float* const lse = args.lse + uint64_t{pair} * args.group;
    const auto* const query = static_cast<const char*>(args.query) + uint64_t{pair} * args.group * kDim * 2;
    const BlockLogits<Element, kDim> logits_of(shared, query, args.group, args.scale);
    logits_of.for_each(
        min(average_slots, args.slots - first),
        [&](uint32_t i) -> KeyBlock {
            const int64_t position = position_of(i), behind = length - position * block_tokens;
            const auto* const keys = static_cast<const char*>(args.keys) + (slots + i) * Tile<kDim>::bytes;
            return {keys, position < 0 || behind <= 0 ? 0 : static_cast<uint32_t>(min(behind, int64_t{block_tokens}))};
        },
        [&](uint32_t i, uint32_t tokens, const float (&logits)[query_rows]) {
            const uint32_t token = threadIdx.x % warp_size;
            if (token >= tokens) return;
            const float largest = logits_of.largest_weight(logits, [&](uint32_t g) { return lse[g] * log2_e; });
            float& average = args.maw[(slots + i) * block_tokens + token];
            const bool is_new = position_of(i) * block_tokens + token == length - 1;
            average = (1 - args.alpha) * (is_new ? 0.0f : average) + args.alpha * largest;
        });
}

}  // namespace sglang_hybrid::cuda
