// The mass of a set of logits: the denominator of their softmax.
#pragma once

#include "sglang_hybrid/cuda/halves.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t tile_heads = 8;  // query heads that are estimated at a time
inline constexpr float ln_of_2 = 0.6931471805599453f;

// The maximum of a set of logits, in units of log2, and the sum of 2^(logit - maximum).
struct Mass {
    float maximum, sum;

    __device__ static Mass none() { return {-INFINITY, 0}; }
    __device__ void add(float logit) {
        const float highest = fmaxf(maximum, logit);
        sum = sum * relative(maximum, highest) + relative(logit, highest);
        maximum = highest;
    }
    template <uint32_t kCount>
    __device__ void add(const float (&logits)[kCount]) {
        float highest = maximum;
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i) highest = fmaxf(highest, logits[i]);
        sum *= relative(maximum, highest);
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i) sum += relative(logits[i], highest);
        maximum = highest;
    }
    __device__ Mass with_any(const Mass& other) const {
        const float highest = fmaxf(maximum, other.maximum);
        return {highest, sum * relative(maximum, highest) + other.sum * relative(other.maximum, highest)};
    }
    // Return the mass of kEnd / kFirst lanes, whose numbers differ in the bits from kFirst up to kEnd. Each of them gets it.
    // With the maximum first, a lane computes one power, however many lanes there are. Called by a whole warp.
    template <uint32_t kFirst, uint32_t kEnd>
    __device__ Mass over_lanes() const {
        float highest = maximum;
#pragma unroll
        for (uint32_t step = kFirst; step < kEnd; step *= 2) {
            highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFF, highest, step));
        }
        float total = sum * relative(maximum, highest);
#pragma unroll
        for (uint32_t step = kFirst; step < kEnd; step *= 2) total += __shfl_xor_sync(0xFFFFFFFF, total, step);
        return {highest, total};
    }
    __device__ float log2() const { return maximum + fast_log2(sum); }

  private:
    __device__ static float relative(float logit, float highest) {
        return logit == -INFINITY ? 0.0f : fast_exp2(logit - highest);
    }
};

}  // namespace sglang_hybrid::cuda
