// Correction of the worker's LSE for what a predicted query got wrong about the weight of the misses: `lse_shift` of the
// reference.
#pragma once

#include "sglang_hybrid/cuda/estimates.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t shift_warps = 4;
inline constexpr uint32_t shift_threads = shift_warps * 32;
inline constexpr uint32_t shift_heads = 16;

// A CTA for each (batch entry, KV head). Even warps estimate with the real query, odd warps with the predicted one; a pair of
// warps takes an octet of the list at a time.
template <class Element, int kDim, int kChannels, Format kFormat>
__global__ void __launch_bounds__(shift_threads, 3) shift_lse(const __grid_constant__ sh_shift_lse args) {
    using Here = Octet<kDim, kChannels, kFormat>;
    extern __shared__ __align__(128) char shared[];
    __shared__ Mass masses[shift_warps][shift_heads];
    const uint32_t heads = args.digests.kv_heads, pair = blockIdx.x, head = pair % heads;
    if (pair / heads >= active_of(args.active_rows, args.batch)) return;
    const uint32_t count = static_cast<uint32_t>(min(max(args.counts[pair], 0), static_cast<int32_t>(args.most_misses)));
    float* const lse = args.lse + uint64_t{pair} * args.group;
    if (count == 0) return;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char* const octet = shared + warp * (Here::bytes + Here::step_bytes);
    char* const written = octet + Here::bytes;
    const char* const steps = Here::steps(octet, written);
    const int32_t* const list = args.pages + uint64_t{pair} * args.most_misses;
    const auto* const query =
        static_cast<const char*>(warp % 2 ? args.query_ahead : args.query) + uint64_t{pair} * args.group * kDim * 2;
    const SketchSteps<kDim, kChannels, kFormat> sketch(args.digests, head, args.scale);

    Mass mass[2][2] = {{Mass::none(), Mass::none()}, {Mass::none(), Mass::none()}};  // [tile][head 2j, 2j + 1]
    for (uint32_t first = warp / 2 * octet_blocks; first < count; first += shift_warps / 2 * octet_blocks) {
        const int32_t page = lane < octet_blocks && first + lane < count ? list[first + lane] : -1;
        Here::request(shared_address(octet), args.digests, head, page, read_once_policy());
        commit_copies();
        wait_for_copies<0>();
        __syncwarp();
        sketch.template write<Element>(octet, written);
        __syncwarp();
        const bool listed = has_page(args.digests, __shfl_sync(0xFFFFFFFF, page, lane / 4));
#pragma unroll
        for (uint32_t tile = 0; tile < 2; ++tile) {
            if (tile * tile_heads >= args.group) break;
            const HeadTile<Element, kDim, kChannels, kFormat> asked(
                query + tile * tile_heads * kDim * 2, args.group - tile * tile_heads, args.digests, head, args.scale, 0.0f);
            const float2 found = asked.estimate(shared_address(octet), steps);
            if (listed) {
                mass[tile][0].add(found.x);
                mass[tile][1].add(found.y);
            }
            __syncwarp();  // tensor core instructions need all lanes together
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const Mass one = mass[i / 2][i % 2].over_lanes<4, 32>();
        if (lane < 4) masses[warp][i / 2 * tile_heads + lane * 2 + i % 2] = one;
    }
    __syncthreads();
    if (threadIdx.x >= args.group) return;
    const auto whole = [&](uint32_t first) {
        return masses[first][threadIdx.x].with_any(masses[first + 2][threadIdx.x]).log2();
    };
    const float shift = (whole(0) - whole(1)) * ln_of_2;
    lse[threadIdx.x] += isfinite(shift) ? shift : 0.0f;
}

}  // namespace sglang_hybrid::cuda
