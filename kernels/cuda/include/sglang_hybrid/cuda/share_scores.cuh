// One score of a block for all KV heads, for one selection per layer, as in the paper ScoutAttention.
#pragma once

#include "sglang_hybrid/cuda/finish_scores.cuh"

namespace sglang_hybrid::cuda {

// A CTA for each batch entry. A thread writes the same positions of every KV head, so it reads only scores of its own.
template <int kTiles>
__global__ void __launch_bounds__(finish_threads) share_scores(const __grid_constant__ sh_share_scores args) {
    __shared__ FinishScratch<kTiles> scratch;
    const sh_score_blocks& scored = args.scored;
    const uint32_t entry = blockIdx.x, heads = scored.digests.kv_heads, end = scored.step.max_blocks;
    if (entry >= active_of(scored.step.active_rows, scored.step.batch) || !has_scores(scored, entry)) return;
    for (uint32_t head = 0; head < heads; ++head) {
        finish_pair(scored, entry, entry * heads + head, scratch);
        __syncthreads();
    }
    float* const scores = scored.scores + owner_of(scored, entry, entry * heads) * end;
    for (uint32_t position = threadIdx.x; position < end; position += finish_threads) {
        float highest = -INFINITY, sum = 0;
        for (uint32_t head = 0; head < heads; ++head) highest = fmaxf(highest, scores[uint64_t{head} * end + position]);
        const bool is_known = highest > -FLT_MAX;
        for (uint32_t head = 0; is_known && head < heads; ++head) {
            sum += fast_exp2((scores[uint64_t{head} * end + position] - highest) / ln_of_2);
        }
        const float shared = is_known ? highest + fast_log2(sum) * ln_of_2 : highest;
        for (uint32_t head = 0; head < heads; ++head) scores[uint64_t{head} * end + position] = shared;
    }
}

}  // namespace sglang_hybrid::cuda
