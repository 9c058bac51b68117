// What the attended blocks stand for: `near_bias` and `near_bias_by_hot` of the reference.
#pragma once

#include "sglang_hybrid/cuda/finish_scores.cuh"
#include "sglang_hybrid/cuda/selection_memory.cuh"

namespace sglang_hybrid::cuda {

// By a whole CTA, behind its selection. `attended`: what is in slots or in a list, or will be when the layer is attended.
template <int kTiles, class Blocks>
__device__ void write_bias_of(const sh_select_blocks& args, uint32_t entry, uint32_t pair, const RowBlocks& row,
                              const PositionSet& attended, FinishScratch<kTiles>& scratch) {
    const sh_score_blocks& scored = args.scored;
    const uint64_t owner = owner_of(scored, entry, pair);
    const Blocks blocks(scored, entry, owner);
    const Estimates estimates(scored, pair);
    const uint32_t head = threadIdx.x;
    Mass candidates = Mass::none();  // all but those that are always in
    if constexpr (!Blocks::is_all) {
        add_up(estimates, blocks, scratch);
        if (head < scored.group) {
            const Mass hot = mass_of(scratch, head);
            const float share = scored.hot_shares[owner * scored.group + head];
            // what is cold has the share of then, by what is hot now
            if (share < 0) candidates = {hot.maximum, hot.sum * (fast_exp2(-share) - 1)};
        }
        __syncthreads();
    }
    add_up(estimates, blocks, scratch, [&](int32_t position) { return row.is_candidate(position); });
    if (head < scored.group) candidates = candidates.with_any(mass_of(scratch, head));
    __syncthreads();
    add_up(estimates, blocks, scratch, [&](int32_t position) { return row.is_candidate(position) && attended.has(position); });
    if (head >= scored.group) return;
    const Mass of_attended = mass_of(scratch, head);
    const float bias = (of_attended.log2() - candidates.log2()) * ln_of_2;
    args.near_bias[owner * scored.group + head] = isfinite(bias) ? fminf(bias, 0.0f) : 0.0f;
}

template <int kTiles>
__device__ void write_bias(const sh_select_blocks& args, uint32_t entry, uint32_t pair, const RowBlocks& row,
                           const PositionSet& attended, char* shared) {
    static_assert(select_threads == finish_threads && sizeof(FinishScratch<kTiles>) <= sizeof(SelectionMemory));
    auto& scratch = *reinterpret_cast<FinishScratch<kTiles>*>(shared);
    const Scored scored = scored_of(args.scored, entry);
    if (scored == Scored::all) write_bias_of<kTiles, AllBlocks>(args, entry, pair, row, attended, scratch);
    if (scored == Scored::hot) write_bias_of<kTiles, HotBlocks>(args, entry, pair, row, attended, scratch);
}

}  // namespace sglang_hybrid::cuda
