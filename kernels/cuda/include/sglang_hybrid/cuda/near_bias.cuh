// The bias of sink, recent and tail blocks, and the weight of the mean value, which make up for blocks left out: `left_out` of
// the reference.
#pragma once

#include "sglang_hybrid/cuda/finish_scores.cuh"
#include "sglang_hybrid/cuda/selection_memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr float least_share = -30;  // logarithm: with less, what is left out is all there is

// Write bias and weight of a pair. `attended`: the blocks that are in slots or in a list, or will be when the layer is attended. Whole
// entries also attend to all other blocks that score at least whole_score. Called by a whole CTA, after its selection.
template <int kTiles>
__device__ void write_bias(const sh_select_blocks& args, uint32_t entry, uint32_t pair, const RowBlocks& row,
                           const PositionSet& attended, char* shared) {
    static_assert(select_threads == finish_threads && sizeof(FinishScratch<kTiles>) <= sizeof(SelectionMemory));
    const sh_score_blocks& scored = args.scored;
    if (!has_scores(scored, entry)) return;
    auto& scratch = *reinterpret_cast<FinishScratch<kTiles>*>(shared);
    const Estimates estimates(scored, pair);
    const uint32_t blocks = blocks_of(scored.step, entry), head = threadIdx.x;
    // candidates are all blocks but sink, recent and tail blocks
    add_up(estimates, blocks, scratch, [&](int32_t position) { return row.is_candidate(position); });
    const Mass candidates = head < scored.group ? scratch.of_heads[head] : Mass::none();
    const bool is_whole = args.whole && args.whole[entry];
    const float* const scores = args.scores + owner_of(scored, entry, pair) * args.step.max_blocks;
    add_up(estimates, blocks, scratch, [&](int32_t position) {
        const bool is_worth = is_whole && scores[position] >= args.whole_score;
        return row.is_candidate(position) && (is_worth || attended.has(position));
    });
    if (head >= scored.group) return;
    const float share = (scratch.of_heads[head].log2() - candidates.log2()) * ln_of_2;
    const float rest = isfinite(share) ? fmaxf(expm1f(-fmaxf(share, least_share)), 0.0f) : 0.0f;  // over the attended
    const float stand_for = 1 + (1 - args.mean_share) * rest;
    const uint64_t to = owner_of(scored, entry, pair) * scored.group + head;
    args.near_bias[to] = -logf(stand_for);
    if (args.mean_weights) args.mean_weights[to] = args.mean_share * rest / stand_for;
}

}  // namespace sglang_hybrid::cuda
