// Sums of values by weights in the model's dtype: the worker's sums, or sums of this device for entries that the worker did not
// serve.
//
// Values are read in place, from registered host memory, and only those of tokens that a query head gives a weight to. A warp
// takes a block at a time; its lanes have eight channels each, of as many tokens as a load of the warp covers. CTAs that share
// a list leave their sums in the workspace, and the last one adds them up in the order of the list.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/kept_tokens_api.h"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t sum_warps = 4;
inline constexpr uint32_t sum_threads = sum_warps * warp_size;
inline constexpr uint32_t sum_loads = 8;  // over PCIe that a lane has in flight before it uses the first

template <int kDim>
struct SumMemory {
    float weights[sum_warps][query_rows][block_tokens];
    float sums[sum_warps][kDim];
};

// Add up every step-th block of a list, from `first` on and before `end`. Called by a warp.
template <class Element, int kDim, int kGroup>
__device__ void sum_blocks(const sh_finish_sums& args, uint32_t pair, uint32_t first, uint32_t step, uint32_t end,
                           float (&weights)[query_rows][block_tokens], float (&sums)[kGroup][8]) {
    constexpr uint32_t row_lanes = kDim / 8, rows = warp_size / row_lanes, rounds = block_tokens / rows;
    const uint32_t lane = threadIdx.x % warp_size, head = pair % args.kv_heads;
    const uint64_t list = uint64_t{pair} * args.max_blocks;
    for (uint32_t i = first; i < end; i += step) {
        const int32_t page = args.pages[list + i], position = args.positions[list + i];
        if (page < 0 || static_cast<uint32_t>(page) >= args.pool_pages) continue;
        if (position < 0 || static_cast<uint32_t>(position) >= args.max_blocks) continue;
        uint32_t asked = 0;
        __syncwarp();  // all lanes are done with the weights before these
        for (uint32_t g = 0; g < args.group; ++g) {
            const uint64_t of_head = (uint64_t{pair} * args.group + g) * args.max_blocks + static_cast<uint32_t>(position);
            const float weight = args.weights[of_head * block_tokens + lane];
            weights[g][lane] = weight;
            asked |= __ballot_sync(0xFFFFFFFF, weight != 0);
        }
        __syncwarp();
        const uint64_t block = uint64_t{static_cast<uint32_t>(page)} * args.kv_heads + head;
        const auto* const values = static_cast<const uint4*>(args.values) + block * block_tokens * row_lanes;
        for (uint32_t begin = 0; begin < rounds; begin += sum_loads) {
            uint4 loaded[sum_loads];
#pragma unroll
            for (uint32_t r = 0; r < sum_loads; ++r) {
                const uint32_t token = (begin + r) * rows + lane / row_lanes;
                loaded[r] = {};
                if (asked >> token % 32 & 1) loaded[r] = load_once(values + token * row_lanes + lane % row_lanes);
            }
#pragma unroll
            for (uint32_t r = 0; r < sum_loads; ++r) {
                const uint32_t token = (begin + r) * rows + lane / row_lanes;
                const uint32_t words[4] = {loaded[r].x, loaded[r].y, loaded[r].z, loaded[r].w};
                float value[8];
#pragma unroll
                for (uint32_t c = 0; c < 8; ++c) value[c] = widened<Element>(static_cast<uint16_t>(words[c / 2] >> c % 2 * 16));
#pragma unroll
                for (uint32_t g = 0; g < kGroup; ++g) {
                    if (g >= args.group) break;
                    const float weight = weights[g][token];
#pragma unroll
                    for (uint32_t c = 0; c < 8; ++c) sums[g][c] += weight * value[c];
                }
            }
        }
    }
    // add up the lanes that have the same channels of other tokens
#pragma unroll
    for (uint32_t g = 0; g < kGroup; ++g) {
        if (g >= args.group) break;
        for (uint32_t apart = row_lanes; apart < warp_size; apart *= 2) {
#pragma unroll
            for (uint32_t c = 0; c < 8; ++c) sums[g][c] += __shfl_xor_sync(0xFFFFFFFF, sums[g][c], apart);
        }
    }
}

// A CTA for each (batch entry, KV head, split).
template <class Element, int kDim, int kGroup>
__global__ void __launch_bounds__(sum_threads) finish_sums(const __grid_constant__ sh_finish_sums args) {
    __shared__ SumMemory<kDim> shared;
    __shared__ bool is_last;
    const uint32_t pair = blockIdx.x / args.splits, split = blockIdx.x % args.splits, entry = pair / args.kv_heads;
    if (entry >= active_of(args.active_rows, args.batch)) return;
    constexpr uint32_t head_quads = kDim / 4, row_lanes = kDim / 8;
    const uint32_t quads = args.group * head_quads, warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    const uint64_t first_quad = uint64_t{pair} * quads;
    if (args.served && args.served[entry]) {
        if (split) return;
        for (uint32_t i = threadIdx.x; i < quads; i += sum_threads) {
            const float4 reply = reinterpret_cast<const float4*>(args.replies)[first_quad + i];
            write_quad(args.out, first_quad + i, reply, static_cast<DType>(args.dtype));
        }
        return;
    }
    const uint32_t count = min(static_cast<uint32_t>(max(args.counts[pair], 0)), args.max_blocks);
    const uint32_t share = (count + args.splits - 1) / args.splits, first = min(split * share, count);
    float sums[kGroup][8] = {};
    sum_blocks<Element, kDim, kGroup>(args, pair, first + warp, sum_warps, min(first + share, count), shared.weights[warp],
                                      sums);
    float* const partial = args.partial_out + (uint64_t{pair} * args.splits + split) * args.group * kDim;
#pragma unroll
    for (uint32_t g = 0; g < kGroup; ++g) {
        if (g >= args.group) break;
        if (lane < row_lanes) {
#pragma unroll
            for (uint32_t c = 0; c < 8; ++c) shared.sums[warp][lane * 8 + c] = sums[g][c];
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < kDim; i += sum_threads) {
            float sum = shared.sums[0][i];
            for (uint32_t w = 1; w < sum_warps; ++w) sum += shared.sums[w][i];
            partial[g * kDim + i] = sum;
        }
        __syncthreads();
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&args.arrived[pair], 1u) == args.splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const auto* const parts = reinterpret_cast<const float4*>(args.partial_out) + first_quad * args.splits;
    for (uint32_t i = threadIdx.x; i < quads; i += sum_threads) {
        float4 all = __ldcg(parts + i);
        for (uint32_t s = 1; s < args.splits; ++s) {
            const float4 part = __ldcg(parts + uint64_t{s} * quads + i);
            all = make_float4(all.x + part.x, all.y + part.y, all.z + part.z, all.w + part.w);
        }
        write_quad(args.out, first_quad + i, all, static_cast<DType>(args.dtype));
    }
    if (threadIdx.x == 0) args.arrived[pair] = 0;
}

}  // namespace sglang_hybrid::cuda
