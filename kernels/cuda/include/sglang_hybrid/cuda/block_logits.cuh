// Logits of single tokens, for kernels that need the attention weights themselves.
//
// A warp takes a block at a time and a lane one of its tokens, for all query heads of the group. The next block is loaded
// meanwhile. Keys are read once, in order and by whole cache lines, into shared memory: they may lie in host memory.
#pragma once

#include "sglang_hybrid/cuda/attend_slots.cuh"
#include "sglang_hybrid/cuda/halves.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t logit_warps = 4;
inline constexpr uint32_t logit_tiles = 2;  // tiles of a warp

struct LogitMemory {
    uint32_t queries;  // [16][kDim] float
    uint32_t maxima;   // [warps][16] float
    uint32_t sums;     // [warps][16] float
    uint32_t lses;     // [16] float
    uint32_t tiles;    // [warps][2]
    uint32_t bytes;

    __host__ __device__ explicit LogitMemory(uint32_t head_dim) {
        queries = 0;
        maxima = queries + query_rows * head_dim * sizeof(float);
        sums = maxima + logit_warps * query_rows * sizeof(float);
        lses = sums + logit_warps * query_rows * sizeof(float);
        tiles = lses + query_rows * sizeof(float);
        bytes = tiles + logit_warps * logit_tiles * block_tokens * head_dim * 2;
    }
};

struct KeyBlock {
    const char* keys;
    uint32_t tokens;  // that count; 0: there is no block
};

// Logits of one (batch entry, KV head), in units of log2. All threads of a CTA call the functions together.
template <class Element, int kDim>
class BlockLogits {
  public:
    // `shared` has LogitMemory(kDim).bytes bytes.
    __device__ BlockLogits(char* shared, const void* queries, uint32_t group, float scale)
        : shared_(shared), at_(kDim), group_(group), warp_(threadIdx.x / warp_size), lane_(threadIdx.x % warp_size) {
        auto* const to = reinterpret_cast<float*>(shared + at_.queries);
        for (uint32_t i = threadIdx.x; i < group * kDim; i += blockDim.x) {
            to[i] = widened<Element>(static_cast<const uint16_t*>(queries)[i]) * (scale * log2_e);
        }
        __syncthreads();
    }

    // Call use(i, tokens, logits) for block block_of(i) of each i < count, in all lanes of the warp that takes the block.
    template <class BlockOf, class Use>
    __device__ void for_each(uint32_t count, BlockOf block_of, Use use) const {
        const uint64_t policy = read_once_policy();
        char* const tiles = shared_ + at_.tiles + warp_ * logit_tiles * Tile<kDim>::bytes;
        const auto request = [&](uint32_t i, uint32_t tile) {
            const KeyBlock block = i < count ? block_of(i) : KeyBlock{nullptr, 0};
            const uint32_t to = shared_address(tiles + tile * Tile<kDim>::bytes);
            if (block.tokens)
                Tile<kDim>::request(to, block.keys, [&](uint32_t token) { return token < block.tokens; }, lane_, policy);
            commit_copies();  // also commits an empty group, since waiting counts groups
            return block.tokens;
        };
        uint32_t tile = 0, tokens = request(warp_, tile);
        for (uint32_t i = warp_; i < count; i += logit_warps) {
            const uint32_t next = request(i + logit_warps, tile ^ 1);
            wait_for_copies<1>();
            __syncwarp();
            float logits[query_rows];
            if (tokens) of_tile(tiles + tile * Tile<kDim>::bytes, logits);
            if (tokens) use(i, tokens, logits);
            __syncwarp();  // all lanes are done with the tile
            tile ^= 1;
            tokens = next;
        }
        wait_for_copies<0>();
        __syncwarp();
    }

    // Return the LSE of each query head over all tokens that count, in units of log2: [16] in shared memory.
    template <class BlockOf>
    __device__ const float* log_sums(uint32_t count, BlockOf block_of) const {
        float maximum[query_rows], sum[query_rows];
        for (uint32_t g = 0; g < query_rows; ++g) maximum[g] = -INFINITY, sum[g] = 0;
        for_each(count, block_of, [&](uint32_t, uint32_t tokens, const float (&logits)[query_rows]) {
            if (lane_ >= tokens) return;
#pragma unroll
            for (uint32_t g = 0; g < query_rows; ++g) {
                if (g >= group_ || logits[g] == -INFINITY) continue;
                const float highest = fmaxf(maximum[g], logits[g]);
                sum[g] = sum[g] * exp2f(maximum[g] - highest) + exp2f(logits[g] - highest);
                maximum[g] = highest;
            }
        });
        auto* const maxima = reinterpret_cast<float*>(shared_ + at_.maxima);
        auto* const sums = reinterpret_cast<float*>(shared_ + at_.sums);
        auto* const lses = reinterpret_cast<float*>(shared_ + at_.lses);
#pragma unroll
        for (uint32_t g = 0; g < query_rows; ++g) {
            if (g >= group_) break;
            float highest = maximum[g];
            for (uint32_t step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFF, highest, step));
            float total = maximum[g] == -INFINITY ? 0.0f : sum[g] * exp2f(maximum[g] - highest);
            for (uint32_t step = 16; step; step /= 2) total += __shfl_xor_sync(0xFFFFFFFF, total, step);
            if (lane_ == 0) maxima[warp_ * query_rows + g] = highest, sums[warp_ * query_rows + g] = total;
        }
        __syncthreads();
        if (threadIdx.x < group_) {
            const Union all(maxima + threadIdx.x, sums + threadIdx.x, logit_warps, query_rows);
            lses[threadIdx.x] = all.sum > 0 ? all.maximum + log2f(all.sum) : -INFINITY;
        }
        __syncthreads();
        return lses;
    }

    // Return the largest weight that a query head gives to this lane's token. lse(g): LSE of query head g in units of log2.
    template <class Lse>
    __device__ float largest_weight(const float (&logits)[query_rows], Lse lse) const {
        float largest = 0;
#pragma unroll
        for (uint32_t g = 0; g < query_rows; ++g) {
            if (g >= group_) break;
            const float total = lse(g);
            if (total != -INFINITY) largest = fmaxf(largest, exp2f(logits[g] - total));
        }
        return largest;
    }

  private:
    __device__ void of_tile(const char* tile, float (&logits)[query_rows]) const {
        const auto* const queries = reinterpret_cast<const float*>(shared_ + at_.queries);
#pragma unroll
        for (uint32_t g = 0; g < query_rows; ++g) logits[g] = 0;
        for (uint32_t chunk = 0; chunk < kDim / 8; ++chunk) {
            const uint4 packed = *reinterpret_cast<const uint4*>(tile + Tile<kDim>::place(lane_, chunk));
            const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
            float key[8];
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) key[i] = widened<Element>(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
#pragma unroll
            for (uint32_t g = 0; g < query_rows; ++g) {
                if (g >= group_) break;
                const auto* const query = reinterpret_cast<const float4*>(queries + g * kDim + chunk * 8);
                const float4 low = query[0], high = query[1];
                logits[g] += low.x * key[0] + low.y * key[1] + low.z * key[2] + low.w * key[3] + high.x * key[4] +
                             high.y * key[5] + high.z * key[6] + high.w * key[7];
            }
        }
    }

    char* const shared_;
    const LogitMemory at_;
    const uint32_t group_, warp_, lane_;
};

}  // namespace sglang_hybrid::cuda
