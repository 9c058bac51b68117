// The fewest weights of a list that add up to a share of all (HCAttention, equation 4), without sorting.
//
// Weights that are not negative are ordered like their bits. A CTA has one list and finds the bits of the smallest weight
// that is kept, eight at a time from the highest: it adds up the weights of each value of the next eight bits, and walks from
// the largest value down to where the share is reached. Of the weights that are equal to the smallest, the first are kept.
//
// Weights are added up as whole numbers, in units of 2^-40 of the largest one: atomic additions in any order give the same
// sum, and so the same entries at every launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sglang_hybrid::cuda {

inline constexpr uint32_t share_threads = 512;
inline constexpr uint32_t share_warps = share_threads / 32;
inline constexpr uint32_t share_most_entries = 1u << 23;  // their sum, in units, is at most 2^63
inline constexpr uint32_t share_buckets = 256;

class WeightSums {
  public:
    // unit_ is set in the body: the host's compiler, which knows no intrinsics, reads initialisers.
    __device__ explicit WeightSums(uint32_t largest_bits) { unit_ = 1099511627776.0 / __uint_as_float(largest_bits); }

    // Return a weight in units. NaN and negative weights count as 0.
    __device__ unsigned long long of(float weight) const {
        return weight > 0 ? static_cast<unsigned long long>(static_cast<double>(weight) * unit_) : 0;
    }

  private:
    double unit_;  // 2^40 over the largest weight
};

// Which entries of a list are kept: those above a weight, and the first ones that are equal to it.
struct Share {
    uint32_t known = 0;  // bits of that weight
    uint64_t equal = 0;  // number of entries with that weight that are kept
};

// Return the share that keeps all weights above 0.
__device__ inline Share whole_share() { return {}; }

// Return the bits of the largest weight above 0, or 0 if there is none. weight_of(i) is the weight of entry i. Called by the
// whole CTA.
template <class WeightOf>
__device__ uint32_t largest_bits(uint32_t entries, WeightOf weight_of) {
    __shared__ uint32_t of_warp[share_warps];
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x; i < entries; i += share_threads) {
        const float weight = weight_of(i);
        if (weight > 0) largest = max(largest, __float_as_uint(weight));
    }
    for (uint32_t step = 16; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    __syncthreads();  // all threads are done with this memory
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    for (uint32_t warp = 0; warp < share_warps; ++warp) largest = max(largest, of_warp[warp]);
    return largest;
}

// Find the fewest entries that have share `least`, below 1, of all weights. `largest`: the result of largest_bits, above 0.
// Called by the whole CTA.
template <class WeightOf>
__device__ Share find_share(uint32_t entries, WeightOf weight_of, uint32_t largest, float least) {
    __shared__ unsigned long long sums[share_buckets];
    __shared__ unsigned long long wanted;  // sum that the entries with the known bits still have to reach
    __shared__ uint32_t known;
    const WeightSums units(largest);
    __syncthreads();
    if (threadIdx.x == 0) known = 0;
    for (uint32_t shift = 32; shift > 0;) {
        const uint32_t above = shift;
        shift -= 8;
        for (uint32_t i = threadIdx.x; i < share_buckets; i += share_threads) sums[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < entries; i += share_threads) {
            const float weight = weight_of(i);
            const uint32_t bits = __float_as_uint(weight);
            const bool counts = weight > 0 && (above == 32 || bits >> above == known >> above);
            if (counts) atomicAdd(&sums[bits >> shift & 0xFF], units.of(weight));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            if (above == 32) {
                unsigned long long all = 0;
                for (uint32_t b = 0; b < share_buckets; ++b) all += sums[b];
                const double share = static_cast<double>(all) * static_cast<double>(least);
                wanted = max(static_cast<unsigned long long>(share), 1ull);
                if (static_cast<double>(wanted) < share) ++wanted;
            }
            uint32_t b = share_buckets - 1;
            while (b > 0 && sums[b] < wanted) wanted -= sums[b--];
            known |= b << shift;
        }
        __syncthreads();
    }
    // as many of the equal entries as it takes to reach the sum
    const unsigned long long each = units.of(__uint_as_float(known));
    return {known, each ? (wanted + each - 1) / each : 0};
}

// Call use(i, weight, is_kept) for all entries, each in one thread, in ordered rounds of share_threads entries. `use` may
// overwrite its entry. Called by the whole CTA.
template <class WeightOf, class Use>
__device__ void for_each_entry(uint32_t entries, WeightOf weight_of, const Share& share, Use use) {
    __shared__ uint32_t of_warp[share_warps];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t before = 0;  // equal entries in front of those of this round
    for (uint32_t first = 0; first < entries; first += share_threads) {
        const uint32_t i = first + threadIdx.x;
        const float weight = i < entries ? weight_of(i) : 0.0f;
        const bool is_equal = weight > 0 && __float_as_uint(weight) == share.known;
        const uint32_t votes = __ballot_sync(0xFFFFFFFF, is_equal);
        if (lane == 0) of_warp[warp] = static_cast<uint32_t>(__popc(votes));
        __syncthreads();
        uint64_t place = before + static_cast<uint32_t>(__popc(votes & ((1u << lane) - 1)));
        for (uint32_t w = 0; w < share_warps; ++w) {
            if (w < warp) place += of_warp[w];
            before += of_warp[w];
        }
        const bool is_above = weight > 0 && __float_as_uint(weight) > share.known;
        if (i < entries) use(i, weight, is_equal ? place < share.equal : is_above);
        __syncthreads();
    }
}

}  // namespace sglang_hybrid::cuda
