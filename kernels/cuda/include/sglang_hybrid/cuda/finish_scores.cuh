// Converts estimates of blocks to scores: `block_scores` of the reference. A score is a share of the whole row, so scores are
// computed when all blocks of a (batch entry, KV head) pair have their estimates.
#pragma once

#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/mass.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/selection_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t finish_threads = 256;
inline constexpr uint32_t finish_warps = finish_threads / 32;

__device__ inline uint32_t blocks_of(const sh_step& step, uint32_t entry) {
    return min(static_cast<uint32_t>(max(step.lengths[entry], 0) + 31) / 32, step.max_blocks);
}

// Return whether an entry is scored. With by_row, entries whose row has no scores are not; nor are entries with 0 in `only`.
__device__ inline bool has_scores(const sh_score_blocks& args, uint32_t entry) {
    if (args.only && !args.only[entry]) return false;
    if (!args.by_row) return true;
    const int32_t row = args.step.row_of[entry];
    return row >= 0 && static_cast<uint32_t>(row) < args.by_row;
}

// Return the index of a pair's list of scores, and of its bias: the (row, KV head) with by_row, else the pair itself.
__device__ inline uint64_t owner_of(const sh_score_blocks& args, uint32_t entry, uint32_t pair) {
    const uint32_t heads = args.digests.kv_heads;
    return args.by_row ? uint64_t{static_cast<uint32_t>(args.step.row_of[entry])} * heads + pair % heads : pair;
}

// Shared memory of add_up.
template <int kTiles>
struct FinishScratch {
    Mass of_warps[kTiles * tile_heads][finish_warps];
    Mass of_heads[kTiles * tile_heads];  // the result
};

// Estimates of a pair, by query head and position.
struct Estimates {
    const float* of_pair;
    uint32_t group, max_blocks;

    __device__ Estimates(const sh_score_blocks& args, uint32_t pair)
        : of_pair(args.estimates + uint64_t{pair} * args.group * args.step.max_blocks), group(args.group),
          max_blocks(args.step.max_blocks) {}
    __device__ float at(uint32_t head, uint32_t position) const {
        return __ldcg(of_pair + uint64_t{head} * max_blocks + position);
    }
};

// Blocks whose estimates a thread loads before it uses the first, since nothing else is read meanwhile. Registers limit the
// number.
template <int kTiles>
inline constexpr uint32_t finish_at_once = kTiles == 1 ? 2 : 1;

struct Everything {
    __device__ bool operator()(int32_t) const { return true; }
};

// Load estimates: found[head][i] is that of block first + i * finish_threads, or -inf if there is none, or none that counts.
template <uint32_t kMost, uint32_t kAtOnce, class Counts = Everything>
__device__ void load_estimates(const Estimates& estimates, uint32_t blocks, uint32_t first, float (&found)[kMost][kAtOnce],
                               Counts counts = {}) {
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t position = first + i * finish_threads;
        const bool is_there = position < blocks && counts(static_cast<int32_t>(position));
#pragma unroll
        for (uint32_t head = 0; head < kMost; ++head) {
            found[head][i] = head < estimates.group && is_there ? estimates.at(head, position) : -INFINITY;
        }
    }
}

// Write the mass of a pair's blocks to scratch.of_heads, for every head. Called by a whole CTA.
template <int kTiles, class Counts = Everything>
__device__ void add_up(const Estimates& estimates, uint32_t blocks, FinishScratch<kTiles>& scratch, Counts counts = {}) {
    constexpr uint32_t most = kTiles * tile_heads, at_once = finish_at_once<kTiles>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Mass row[most];
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) row[head] = Mass::none();
    for (uint32_t first = threadIdx.x; first < blocks; first += at_once * finish_threads) {
        float found[most][at_once];
        load_estimates(estimates, blocks, first, found, counts);
#pragma unroll
        for (uint32_t head = 0; head < most; ++head) row[head].add(found[head]);
    }
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) {
        const Mass of_warp = head < estimates.group ? row[head].template over_lanes<1, 32>() : Mass::none();
        if (lane == 0) scratch.of_warps[head][warp] = of_warp;
    }
    __syncthreads();
    static_assert(32 % finish_warps == 0 && most * finish_warps % 32 == 0 && most * finish_warps <= finish_threads);
    if (threadIdx.x < most * finish_warps) {
        const uint32_t head = threadIdx.x / finish_warps, part = threadIdx.x % finish_warps;
        const Mass whole = scratch.of_warps[head][part].template over_lanes<1, finish_warps>();
        if (part == 0) scratch.of_heads[head] = whole;
    }
    __syncthreads();
}

// Write the scores of a pair from its estimates. Called by a whole CTA.
template <int kTiles>
__device__ void finish_pair(const sh_score_blocks& args, uint32_t entry, uint32_t pair, FinishScratch<kTiles>& scratch) {
    constexpr uint32_t most = kTiles * tile_heads, at_once = finish_at_once<kTiles>;
    const uint32_t blocks = blocks_of(args.step, entry), end = args.step.max_blocks;
    const Estimates estimates(args, pair);
    add_up(estimates, blocks, scratch);
    float highest_of[most], rest_of[most];  // their sum is the logarithm of the mass
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) {
        const Mass& all = scratch.of_heads[head];
        highest_of[head] = all.maximum;
        rest_of[head] = fast_log2(all.sum);
    }
    float* const scores = args.scores + owner_of(args, entry, pair) * end;
    for (uint32_t first = threadIdx.x; first < end; first += at_once * finish_threads) {
        float found[most][at_once];
        load_estimates(estimates, blocks, first, found);
#pragma unroll
        for (uint32_t i = 0; i < at_once; ++i) {
            const uint32_t position = first + i * finish_threads;
            if (position >= end) break;
            float share[most], highest = -FLT_MAX;
#pragma unroll
            for (uint32_t head = 0; head < most; ++head) {
                if (head >= args.group) break;
                // one after the other: estimates of damaged pages are so large that a sum would swallow the rest
                share[head] = found[head][i] - highest_of[head] - rest_of[head];
                highest = fmaxf(highest, share[head]);
            }
            float sum = 0;
#pragma unroll
            for (uint32_t head = 0; head < most; ++head) {
                if (head < args.group) sum += fast_exp2(share[head] - highest);
            }
            // no head can estimate the block
            const float score = highest < -1e37f ? -FLT_MAX : (highest + fast_log2(sum)) * ln_of_2;
            scores[position] = position < blocks ? score : -INFINITY;
        }
    }
}

}  // namespace sglang_hybrid::cuda
