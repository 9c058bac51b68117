// The fewest weights of a list that add up to a share of all (HCAttention, equation 4), without sorting.
//
// Weights that are not negative have the order of their bits. A CTA has one list and finds the bits of the smallest weight
// that is kept, eight at a time from the highest: it adds up the weights of each value of the next eight bits, and walks from
// the largest value down to where the share is reached. Of weights that are equal to the smallest the first are kept.
//
// Weights are added up as whole numbers, in units of 2^-40 of the largest one: atomic additions in any order give the same
// sum, and so the same entries at every launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sglang_hybrid/cuda/weights_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t share_threads = 512;
inline constexpr uint32_t share_warps = share_threads / 32;
inline constexpr uint32_t share_most_entries = 1u << 23;  // whose sum is below 2^63
inline constexpr uint32_t share_buckets = 256;

class WeightSums {
  public:
    // In the body: the host's compiler, which knows no intrinsics, reads initialisers.
    __device__ explicit WeightSums(uint32_t largest_bits) { unit_ = 1099511627776.0 / __uint_as_float(largest_bits); }

    // NaN and what is below 0 count as nothing.
    __device__ unsigned long long of(float weight) const {
        return weight > 0 ? static_cast<unsigned long long>(static_cast<double>(weight) * unit_) : 0;
    }

  private:
    double unit_;  // 2^40 over the largest weight
};

__global__ void __launch_bounds__(share_threads) cumulative_share(const __grid_constant__ sh_cumulative_share args) {
    __shared__ unsigned long long sums[share_buckets];
    __shared__ unsigned long long wanted;  // of the entries with the bits that are known
    __shared__ uint32_t largest, known, places[share_warps];
    const uint64_t begin = uint64_t{blockIdx.x} * args.entries;
    const float* const weights = args.weights + begin;
    auto* const kept = static_cast<uint8_t*>(args.kept) + begin;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    if (threadIdx.x == 0) largest = known = 0;
    __syncthreads();
    uint32_t mine = 0;
    for (uint32_t i = threadIdx.x; i < args.entries; i += share_threads) {
        if (weights[i] > 0) mine = max(mine, __float_as_uint(weights[i]));
    }
    for (uint32_t step = 16; step > 0; step /= 2) mine = max(mine, __shfl_xor_sync(0xFFFFFFFF, mine, step));
    if (lane == 0) places[warp] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t w = 0; w < share_warps; ++w) largest = max(largest, places[w]);
    }
    __syncthreads();
    if (args.least >= 1 || largest == 0) {
        for (uint32_t i = threadIdx.x; i < args.entries; i += share_threads) kept[i] = weights[i] > 0;
        return;
    }

    const WeightSums units(largest);
    for (uint32_t shift = 32; shift > 0;) {
        const uint32_t above = shift;
        shift -= 8;
        for (uint32_t i = threadIdx.x; i < share_buckets; i += share_threads) sums[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < args.entries; i += share_threads) {
            const uint32_t bits = __float_as_uint(weights[i]);
            const bool counts = weights[i] > 0 && (above == 32 || bits >> above == known >> above);
            if (counts) atomicAdd(&sums[bits >> shift & 0xFF], units.of(weights[i]));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            if (above == 32) {
                unsigned long long all = 0;
                for (uint32_t b = 0; b < share_buckets; ++b) all += sums[b];
                const double share = static_cast<double>(all) * static_cast<double>(args.least);
                wanted = max(static_cast<unsigned long long>(share), 1ull);
                if (static_cast<double>(wanted) < share) ++wanted;
            }
            uint32_t b = share_buckets - 1;
            while (b > 0 && sums[b] < wanted) wanted -= sums[b--];
            known |= b << shift;
        }
        __syncthreads();
    }

    // As many of the equal ones as it takes, in their order.
    const unsigned long long each = units.of(__uint_as_float(known));
    const uint64_t equal = each ? (wanted + each - 1) / each : 0;
    uint64_t before = 0;  // equal ones in front of the entries of this round
    for (uint32_t first = 0; first < args.entries; first += share_threads) {
        const uint32_t i = first + threadIdx.x;
        const float weight = i < args.entries ? weights[i] : 0.0f;
        const bool is_equal = weight > 0 && __float_as_uint(weight) == known;
        const uint32_t votes = __ballot_sync(0xFFFFFFFF, is_equal);
        if (lane == 0) places[warp] = static_cast<uint32_t>(__popc(votes));
        __syncthreads();
        uint64_t place = before + static_cast<uint32_t>(__popc(votes & ((1u << lane) - 1)));
        for (uint32_t w = 0; w < share_warps; ++w) {
            if (w < warp) place += places[w];
            before += places[w];
        }
        if (i < args.entries) kept[i] = is_equal ? place < equal : weight > 0 && __float_as_uint(weight) > known;
        __syncthreads();
    }
}

}  // namespace sglang_hybrid::cuda
