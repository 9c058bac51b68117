// Three partial attentions become one, in the model's dtype.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/elements.cuh"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t merge_threads = 256;

struct Partial {
    float4 out;
    float lse;
};

__device__ inline Partial empty_partial() { return {make_float4(0, 0, 0, 0), -INFINITY}; }

// `merge` of the reference with its own roundings: products and sums are rounded one by one, not fused.
__device__ inline Partial merged(const Partial& a, const Partial& b) {
    // chosen, not computed, where a side is empty: its output may be anything
    if (b.lse == -INFINITY) return a.lse == -INFINITY ? empty_partial() : a;
    if (a.lse == -INFINITY) return b;
    const float lse = __fadd_rn(fmaxf(a.lse, b.lse), log1pf(expf(-fabsf(__fsub_rn(a.lse, b.lse)))));
    const float weight_a = expf(__fsub_rn(a.lse, lse)), weight_b = expf(__fsub_rn(b.lse, lse));
    const auto both = [&](float x, float y) { return __fadd_rn(__fmul_rn(x, weight_a), __fmul_rn(y, weight_b)); };
    return {make_float4(both(a.out.x, b.out.x), both(a.out.y, b.out.y), both(a.out.z, b.out.z), both(a.out.w, b.out.w)),
            lse};
}

// One thread merges four channels of one head.
__global__ void __launch_bounds__(merge_threads) merge_sides(const __grid_constant__ sh_merge args) {
    const uint32_t quads = args.head_dim / 4;
    const uint64_t index = uint64_t{blockIdx.x} * merge_threads + threadIdx.x;
    const uint64_t head = index / quads;
    if (head >= uint64_t{active_of(args.active_rows, args.batch)} * args.heads) return;

    const auto side = [&](const sh_side& from) -> Partial {
        if (!from.out) return empty_partial();
        return {reinterpret_cast<const float4*>(from.out)[index], from.lse[head]};
    };
    const Partial all = merged(merged(side(args.sides[0]), side(args.sides[1])), side(args.sides[2]));
    const auto dtype = static_cast<DType>(args.dtype);
    if (dtype == DType::fp32) {
        static_cast<float4*>(args.out)[index] = all.out;
    } else if (dtype == DType::bf16) {
        static_cast<uint2*>(args.out)[index] = {BFloat16::pack(all.out.x, all.out.y), BFloat16::pack(all.out.z, all.out.w)};
    } else {
        static_cast<uint2*>(args.out)[index] = {Float16::pack(all.out.x, all.out.y), Float16::pack(all.out.z, all.out.w)};
    }
    if (args.lse && index % quads == 0) args.lse[head] = all.lse;
}

}  // namespace sglang_hybrid::cuda
