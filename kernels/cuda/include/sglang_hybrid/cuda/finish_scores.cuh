// From estimates of blocks to scores: `block_scores` of the reference. A score is a share of the whole row, so this comes when
// all blocks of a (batch entry, KV head) pair have their estimates.
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

__device__ inline bool row_has_scores(const sh_score_blocks& args, int32_t row) {
    return row >= 0 && static_cast<uint32_t>(row) < args.by_row;
}

// Whether an entry is scored in this step. Steps are counted from each row's first one, as for recalls.
__device__ inline bool is_scored(const sh_score_blocks& args, uint32_t entry) {
    if (args.by_row && !row_has_scores(args, args.step.row_of[entry])) return false;
    if (args.interval <= 1 || (args.due && args.due[entry])) return true;
    const int32_t first = args.first_lengths[args.step.row_of[entry]];
    if (first < 0) return true;
    return static_cast<uint32_t>(args.step.lengths[entry] - first + 1 + static_cast<int32_t>(args.layer)) % args.interval == 0;
}

// In shared memory, for finish_pair.
template <int kTiles>
struct FinishScratch {
    Mass of_warps[finish_warps][kTiles * tile_heads];
};

// By a whole CTA: the estimates of a pair become scores. Nothing else is read meanwhile, so a thread asks for several blocks
// at once.
template <int kTiles>
__device__ void finish_pair(const sh_score_blocks& args, uint32_t entry, uint32_t pair, FinishScratch<kTiles>& scratch) {
    constexpr uint32_t most = kTiles * tile_heads;
    const uint32_t count = blocks_of(args.step, entry), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t max_blocks = args.step.max_blocks;
    const float* const estimates = args.estimates + uint64_t{pair} * args.group * max_blocks;
    constexpr uint32_t at_once = 2;
    float found[most][at_once];  // of blocks first, first + finish_threads, ...; -inf behind the last
    const auto load = [&](uint32_t first) {
#pragma unroll
        for (uint32_t head = 0; head < most; ++head) {
#pragma unroll
            for (uint32_t i = 0; i < at_once; ++i) {
                const uint32_t block = first + i * finish_threads;
                const bool is_there = head < args.group && block < count;
                found[head][i] = is_there ? __ldcg(estimates + head * max_blocks + block) : -INFINITY;
            }
        }
    };
    Mass row[most];
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) row[head] = Mass::none();
    for (uint32_t first = threadIdx.x; first < count; first += at_once * finish_threads) {
        load(first);
#pragma unroll
        for (uint32_t head = 0; head < most; ++head) row[head].add(found[head]);
    }
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) {
#pragma unroll
        for (uint32_t step = 16; step; step /= 2) row[head] = row[head].with_any(row[head].from_lane(step));
        if (lane == 0) scratch.of_warps[warp][head] = row[head];
    }
    __syncthreads();
    float highest_of[most], rest_of[most];  // together the logarithm of the row's mass
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) {
        Mass all = Mass::none();
        for (uint32_t i = 0; i < finish_warps; ++i) all = all.with_any(scratch.of_warps[i][head]);
        highest_of[head] = all.maximum;
        rest_of[head] = fast_log2(all.sum);
    }
    const uint32_t heads = args.digests.kv_heads;
    const uint64_t list = args.by_row ? uint64_t{static_cast<uint32_t>(args.step.row_of[entry])} * heads + pair % heads : pair;
    float* const scores = args.scores + list * max_blocks;
    for (uint32_t first = threadIdx.x; first < max_blocks; first += at_once * finish_threads) {
        load(first);
#pragma unroll
        for (uint32_t i = 0; i < at_once; ++i) {
            const uint32_t block = first + i * finish_threads;
            if (block >= max_blocks) break;
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
            // a block that no head can estimate
            const float score = highest < -1e37f ? -FLT_MAX : (highest + fast_log2(sum)) * ln_of_2;
            scores[block] = block < count ? score : -INFINITY;
        }
    }
}

// A CTA for each pair.
template <int kTiles>
__global__ void __launch_bounds__(finish_threads) finish_scores(const __grid_constant__ sh_score_blocks args) {
    __shared__ FinishScratch<kTiles> scratch;
    const uint32_t pair = blockIdx.x, entry = pair / args.digests.kv_heads;
    if (entry >= active_of(args.step.active_rows, args.step.batch) || !is_scored(args, entry)) return;
    finish_pair<kTiles>(args, entry, pair, scratch);
}

}  // namespace sglang_hybrid::cuda
