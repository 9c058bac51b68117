// Partial attentions, four channels of a head at a time: merging two of them, and writing one in the model's dtype.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/elements.cuh"

namespace sglang_hybrid::cuda {

struct Partial {
    float4 out;
    float lse;
};

__device__ inline Partial empty_partial() { return {make_float4(0, 0, 0, 0), -INFINITY}; }

// Merge as `merge` of the reference, with the same roundings: products and sums are rounded one by one, not fused.
__device__ inline Partial merged(const Partial& a, const Partial& b) {
    // if a side is empty, the other one is returned unchanged: the output of an empty side may be anything
    if (b.lse == -INFINITY) return a.lse == -INFINITY ? empty_partial() : a;
    if (a.lse == -INFINITY) return b;
    const float lse = __fadd_rn(fmaxf(a.lse, b.lse), log1pf(expf(-fabsf(__fsub_rn(a.lse, b.lse)))));
    const float weight_a = expf(__fsub_rn(a.lse, lse)), weight_b = expf(__fsub_rn(b.lse, lse));
    const auto both = [&](float x, float y) { return __fadd_rn(__fmul_rn(x, weight_a), __fmul_rn(y, weight_b)); };
    return {make_float4(both(a.out.x, b.out.x), both(a.out.y, b.out.y), both(a.out.z, b.out.z), both(a.out.w, b.out.w)), lse};
}

// Write quad `index` of an output, which is four channels, in `dtype`.
__device__ inline void write_quad(void* out, uint64_t index, float4 quad, DType dtype) {
    if (dtype == DType::fp32) {
        static_cast<float4*>(out)[index] = quad;
    } else if (dtype == DType::bf16) {
        static_cast<uint2*>(out)[index] = {BFloat16::pack(quad.x, quad.y), BFloat16::pack(quad.z, quad.w)};
    } else {
        static_cast<uint2*>(out)[index] = {Float16::pack(quad.x, quad.y), Float16::pack(quad.z, quad.w)};
    }
}

}  // namespace sglang_hybrid::cuda
