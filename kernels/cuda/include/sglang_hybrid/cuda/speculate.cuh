// Speculated logits of all tokens of a row, and how far each token is below the best one: `below_best` of
// policies/infinigen/selection.py.
//
// A token is compared with the best one of each query head, so there are two passes over the partial keys: one for the best
// logits, one for ranks. Keeping the logits of the first pass would take more memory than the second pass saves. Both passes
// compute a logit by the same operations in the same order, so the best token is exactly 0 below the best.
//
// A warp takes a block at a time, and a lane one of its tokens.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"
#include "sglang_hybrid/cuda/best_blocks.cuh"
#include "sglang_hybrid/cuda/partial_keys.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t speculate_warps = encode_threads / warp_size;

// Speculated logits of one (batch entry, KV head), for the CTA's share of its blocks.
template <class Element>
class Speculation {
  public:
    uint32_t earlier = 0;  // tokens before the step's own one

    // `shared`: [2][16][most_key_dim] floats.
    __device__ Speculation(const sh_speculate& args, uint32_t pair, uint32_t split, float* shared)
        : args_(args), entry_(pair / args.partial.kv_heads), head_(pair % args.partial.kv_heads), split_(split),
          queries_(shared + query_rows * most_key_dim) {
        const int32_t length = args.step.lengths[entry_];
        if (length < 1 || length > static_cast<int32_t>(args.step.max_blocks * block_tokens)) return;
        earlier = static_cast<uint32_t>(length - 1);
        const uint32_t dim = args.partial.head_dim;
        const auto* const query = static_cast<const uint16_t*>(args.query) + uint64_t{pair} * args.group * dim;
        for (uint32_t i = threadIdx.x; i < args.group * dim; i += encode_threads) shared[i] = widened<Element>(query[i]);
        __syncthreads();
        times_basis(shared, args.group, args.partial, head_, [&](uint32_t g, uint32_t column, float sum) {
            queries_[g * args.partial.columns + column] = sum * args.scale;
        });
        __syncthreads();
    }

    // Call use(block, logits) for each block with earlier tokens, in all lanes of the warp that takes the block. Logits are
    // never NaN or infinite; those of tokens that are not earlier have no meaning.
    template <class Use>
    __device__ void for_each_block(Use use) const {
        const uint32_t blocks = (earlier + block_tokens - 1) / block_tokens, lane = threadIdx.x % warp_size;
        const int32_t* const pages = args_.step.page_table + uint64_t{entry_} * args_.step.max_blocks;
        const uint32_t columns = args_.partial.columns, chunks = columns / 4;
        for (uint32_t block = split_ * speculate_warps + threadIdx.x / warp_size; block < blocks;
             block += args_.splits * speculate_warps) {
            const int32_t page = pages[block];
            float logits[query_rows];
#pragma unroll
            for (uint32_t g = 0; g < query_rows; ++g) logits[g] = 0;
            const bool is_known = has_page(args_.partial, page) && block * block_tokens + lane < earlier;
            if (is_known) {
                const uint64_t token =
                    (uint64_t{static_cast<uint32_t>(page)} * args_.partial.kv_heads + head_) * block_tokens + lane;
                const auto* const codes =
                    reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(args_.partial.codes) + token * columns);
                for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                    const uint2 packed = codes[chunk];
                    const float key[4] = {widened<Element>(static_cast<uint16_t>(packed.x)),
                                          widened<Element>(static_cast<uint16_t>(packed.x >> 16)),
                                          widened<Element>(static_cast<uint16_t>(packed.y)),
                                          widened<Element>(static_cast<uint16_t>(packed.y >> 16))};
#pragma unroll
                    for (uint32_t g = 0; g < query_rows; ++g) {
                        if (g >= args_.group) break;
                        const float4 query = *reinterpret_cast<const float4*>(queries_ + g * columns + chunk * 4);
                        logits[g] = fmaf(query.x, key[0], logits[g]);
                        logits[g] = fmaf(query.y, key[1], logits[g]);
                        logits[g] = fmaf(query.z, key[2], logits[g]);
                        logits[g] = fmaf(query.w, key[3], logits[g]);
                    }
                }
            }
#pragma unroll
            for (uint32_t g = 0; g < query_rows; ++g) logits[g] = is_known ? or_lowest(logits[g]) : -FLT_MAX;
            use(block, logits);
        }
    }

  private:
    const sh_speculate& args_;
    const uint32_t entry_, head_, split_;
    float* const queries_;  // partial queries, scaled
};

// Find the best logit of each query head in a share of the blocks. A CTA for each share of a (batch entry, KV head).
template <class Element>
__global__ void __launch_bounds__(encode_threads) best_logits(const __grid_constant__ sh_speculate args) {
    __shared__ __align__(16) float shared[2 * query_rows * most_key_dim];
    __shared__ float of_warps[speculate_warps][query_rows];
    const uint32_t pair = blockIdx.x / args.splits, split = blockIdx.x % args.splits;
    if (pair / args.partial.kv_heads >= active_of(args.step.active_rows, args.step.batch)) return;
    if (split == 0 && threadIdx.x == 0) args.wanted[pair] = 0;  // rank_items adds to it
    const Speculation<Element> row(args, pair, split, shared);
    float best[query_rows];
#pragma unroll
    for (uint32_t g = 0; g < query_rows; ++g) best[g] = -FLT_MAX;
    row.for_each_block([&](uint32_t, const float (&logits)[query_rows]) {
#pragma unroll
        for (uint32_t g = 0; g < query_rows; ++g) best[g] = fmaxf(best[g], logits[g]);
    });
#pragma unroll
    for (uint32_t g = 0; g < query_rows; ++g) {
        for (uint32_t step = 16; step; step /= 2) best[g] = fmaxf(best[g], __shfl_xor_sync(0xFFFFFFFF, best[g], step));
        if (threadIdx.x % warp_size == 0) of_warps[threadIdx.x / warp_size][g] = best[g];
    }
    __syncthreads();
    if (threadIdx.x >= query_rows) return;
    float highest = of_warps[0][threadIdx.x];
    for (uint32_t warp = 1; warp < speculate_warps; ++warp) highest = fmaxf(highest, of_warps[warp][threadIdx.x]);
    args.best[uint64_t{blockIdx.x} * query_rows + threadIdx.x] = highest;
}

// Write the ranks of a share's items, and count the wanted items. A CTA for each share of a (batch entry, KV head).
template <class Element>
__global__ void __launch_bounds__(encode_threads) rank_items(const __grid_constant__ sh_speculate args) {
    __shared__ __align__(16) float shared[2 * query_rows * most_key_dim];
    __shared__ float best[query_rows];
    const uint32_t pair = blockIdx.x / args.splits, split = blockIdx.x % args.splits, lane = threadIdx.x % warp_size;
    if (pair / args.partial.kv_heads >= active_of(args.step.active_rows, args.step.batch)) return;
    if (threadIdx.x < query_rows) {
        const float* const of_splits = args.best + uint64_t{pair} * args.splits * query_rows + threadIdx.x;
        float highest = of_splits[0];
        for (uint32_t other = 1; other < args.splits; ++other) highest = fmaxf(highest, of_splits[other * query_rows]);
        best[threadIdx.x] = highest;
    }
    const Speculation<Element> row(args, pair, split, shared);  // its constructor waits for all threads
    const uint32_t tail = row.earlier / block_tokens;
    uint32_t* const ranks = args.ranks + uint64_t{pair} * args.step.max_blocks * (args.by_block ? 1 : block_tokens);
    uint32_t wanted = 0;
    row.for_each_block([&](uint32_t block, const float (&logits)[query_rows]) {
        const bool is_earlier = block * block_tokens + lane < row.earlier;
        float below = -FLT_MAX;
#pragma unroll
        for (uint32_t g = 0; g < query_rows; ++g) {
            if (g < args.group) below = fmaxf(below, logits[g] - best[g]);
        }
        if (!args.by_block) {
            if (is_earlier) ranks[block * block_tokens + lane] = rank_of(below);
            wanted += static_cast<uint32_t>(__popc(__ballot_sync(0xFFFFFFFF, is_earlier && below > -args.alpha)));
            return;
        }
        if (!is_earlier) below = -FLT_MAX;
        for (uint32_t step = 16; step; step /= 2) below = fmaxf(below, __shfl_xor_sync(0xFFFFFFFF, below, step));
        if (block == tail) return;  // the tail is always chosen
        if (lane == 0) ranks[block] = rank_of(below);
        wanted += below > -args.alpha;
    });
    if (lane == 0 && wanted) atomicAdd(&args.wanted[pair], wanted);
}

}  // namespace sglang_hybrid::cuda
