// The bias of sink, recent and tail blocks, which makes up for blocks left out: `near_bias` of the reference.
#pragma once

#include "sglang_hybrid/cuda/finish_scores.cuh"
#include "sglang_hybrid/cuda/selection_memory.cuh"

namespace sglang_hybrid::cuda {

// Write the bias of a pair. `attended`: the blocks that are in slots or in a list, or will be when the layer is attended. Whole
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
    const float bias = (scratch.of_heads[head].log2() - candidates.log2()) * ln_of_2;
    args.near_bias[owner_of(scored, entry, pair) * scored.group + head] = isfinite(bias) ? fminf(bias, 0.0f) : 0.0f;
}

}  // namespace sglang_hybrid::cuda
