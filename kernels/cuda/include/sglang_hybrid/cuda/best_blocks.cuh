// Selection of the best of many scores by one CTA: radix selection in shared memory, 11 bits at a time.
#pragma once

#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/selection_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t select_threads = 256;
inline constexpr uint32_t select_warps = select_threads / 32;
inline constexpr uint32_t radix_bins = 2048;

// Return the rank of a score: larger for better scores. NaN and infinities have the rank of the lowest number.
__device__ inline uint32_t rank_of(float score) {
    const uint32_t bits = __float_as_uint(or_lowest(score));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct SelectMemory {
    uint32_t histogram[radix_bins];
    uint32_t totals[2 * select_warps];
    uint32_t found[3];  // of best_ranks: the bin of the last rank that is wanted, how many of it, and of how many
};

// Return the sum of `value` over the threads before this one, and write the sum over all to `total`. Called by a whole CTA.
__device__ inline uint32_t sum_before(uint32_t value, SelectMemory& memory, uint32_t& total) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = value;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFF, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // all threads have read what an earlier call left
    if (lane == 31) memory.totals[warp] = sum;
    __syncthreads();
    uint32_t before = 0;
    total = 0;
    for (uint32_t i = 0; i < select_warps; ++i) {
        if (i < warp) before += memory.totals[i];
        total += memory.totals[i];
    }
    return before + sum - value;
}

struct Threshold {
    uint32_t rank;  // all larger ranks are among the best
    uint32_t ties;  // and this number of equal ranks
};

// Return the threshold of the `wanted` largest of `count` ranks; 1 <= wanted <= count. Called by a whole CTA.
__device__ inline Threshold best_ranks(const uint32_t* ranks, uint32_t count, uint32_t wanted, SelectMemory& memory) {
    uint32_t decided = 0, mask = 0;
#pragma unroll
    for (uint32_t pass = 0; pass < 3; ++pass) {
        const uint32_t shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        const uint32_t bins = pass == 2 ? 1024 : 2048;
        for (uint32_t i = threadIdx.x; i < bins; i += select_threads) memory.histogram[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count; i += select_threads) {
            const uint32_t rank = ranks[i];
            if ((rank & mask) == decided) atomicAdd(&memory.histogram[rank >> shift & (bins - 1)], 1u);
        }
        __syncthreads();
        // thread 0 has the highest bins
        const uint32_t each = bins / select_threads, highest = bins - 1 - threadIdx.x * each;
        uint32_t mine = 0, total;
        for (uint32_t i = 0; i < each; ++i) mine += memory.histogram[highest - i];
        uint32_t above = sum_before(mine, memory, total);
        if (above < wanted && wanted <= above + mine) {
            for (uint32_t i = 0;; ++i) {
                const uint32_t in_bin = memory.histogram[highest - i];
                if (wanted <= above + in_bin) {
                    memory.found[0] = highest - i;
                    memory.found[1] = wanted - above;
                    memory.found[2] = in_bin;
                    break;
                }
                above += in_bin;
            }
        }
        __syncthreads();
        decided |= memory.found[0] << shift;
        mask |= (bins - 1) << shift;
        wanted = memory.found[1];
        const bool takes_bin = wanted == memory.found[2];
        __syncthreads();
        if (takes_bin && decided) return {decided - 1, 0};  // lower bits, which are 0 in `decided`, do not matter
    }
    return {decided, wanted};
}

// Call take(n, index) for the n-th of the best ranks, in the order of their indices. Of equal ranks the first are taken. Called
// by a whole CTA.
template <class Take>
__device__ void take_best(const uint32_t* ranks, uint32_t count, const Threshold& threshold, SelectMemory& memory, Take take) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = (1u << lane) - 1;
    const uint32_t each = (count + select_threads - 1) / select_threads * 32;  // consecutive ranks of a warp
    const uint32_t from = min(warp * each, count), to = min(from + each, count);
    uint32_t larger = 0, equal = 0;
    for (uint32_t base = from; base < to; base += 32) {
        const uint32_t rank = base + lane < to ? ranks[base + lane] : 0;
        const bool exists = base + lane < to;
        larger += __popc(__ballot_sync(0xFFFFFFFF, exists && rank > threshold.rank));
        equal += __popc(__ballot_sync(0xFFFFFFFF, exists && rank == threshold.rank));
    }
    __syncthreads();
    if (lane == 0) memory.totals[warp] = larger, memory.totals[select_warps + warp] = equal;
    __syncthreads();
    larger = equal = 0;
    for (uint32_t i = 0; i < warp; ++i) larger += memory.totals[i], equal += memory.totals[select_warps + i];
    for (uint32_t base = from; base < to; base += 32) {
        const bool exists = base + lane < to;
        const uint32_t rank = exists ? ranks[base + lane] : 0;
        const uint32_t all_larger = __ballot_sync(0xFFFFFFFF, exists && rank > threshold.rank);
        const uint32_t all_equal = __ballot_sync(0xFFFFFFFF, exists && rank == threshold.rank);
        const uint32_t my_larger = larger + __popc(all_larger & before), my_equal = equal + __popc(all_equal & before);
        const bool taken = exists && (rank > threshold.rank || (rank == threshold.rank && my_equal < threshold.ties));
        if (taken) take(my_larger + min(my_equal, threshold.ties), base + lane);
        larger += __popc(all_larger);
        equal += __popc(all_equal);
    }
    __syncthreads();
}

}  // namespace sglang_hybrid::cuda
