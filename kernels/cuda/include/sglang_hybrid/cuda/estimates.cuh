// Estimates of blocks by queries: `sketch_logits` and `digest_logits` of the reference, on the tensor cores.
//
// A warp takes eight blocks (an octet) and eight query heads at a time. With lane = 4 * i + j:
//
//   digests   A (16 x D)   rows 0 to 7 are the maxima of blocks 0 to 7, rows 8 to 15 their minima
//             B (D x 8)    the queries              -> C: lane has block i's q . max and q . min of heads 2j, 2j + 1
//   codes     A (16 x C)   16 tokens of one block, four bits each turned into float16
//             B (C x 8)    the queries, times the block's steps in those channels
//                          -> C: lane has tokens i, i + 8 of heads 2j, 2j + 1; twice for the 32 tokens of a block
//
// Each lane keeps the log-sum-exp of its tokens for all eight blocks. Then lanes of equal j exchange them, so that lane i
// ends up with the sum of block i: the place where the product with the digests has that block.
//
// Logits are in units of log2, the scale included.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/selection_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t octet_blocks = 8;
inline constexpr uint32_t tile_heads = 8;
inline constexpr float log2_of_e = 1.4426950408889634f;
inline constexpr float ln_of_2 = 0.6931471805599453f;

// The maximum of some logits, and the sum of their powers relative to it.
struct Mass {
    float maximum, sum;

    __device__ static Mass none() { return {-INFINITY, 0}; }
    __device__ void add(float logit) {
        const float highest = fmaxf(maximum, logit);
        sum = sum * relative(maximum, highest) + relative(logit, highest);
        maximum = highest;
    }
    // of two masses that are not empty
    __device__ Mass with(const Mass& other) const {
        const float highest = fmaxf(maximum, other.maximum);
        return {highest, sum * fast_exp2(maximum - highest) + other.sum * fast_exp2(other.maximum - highest)};
    }
    __device__ Mass with_any(const Mass& other) const {
        const float highest = fmaxf(maximum, other.maximum);
        return {highest, sum * relative(maximum, highest) + other.sum * relative(other.maximum, highest)};
    }
    __device__ Mass from_lane(uint32_t step) const {
        return {__shfl_xor_sync(0xFFFFFFFF, maximum, step), __shfl_xor_sync(0xFFFFFFFF, sum, step)};
    }
    __device__ float log2() const { return maximum + fast_log2(sum); }

  private:
    __device__ static float relative(float logit, float highest) {
        return logit == -INFINITY ? 0.0f : fast_exp2(logit - highest);
    }
};

// -- eight blocks in shared memory -------------------------------------------------------------------------------------

template <int kDim, int kChannels>
struct Octet {
    static constexpr uint32_t row_bytes = kDim * 2;  // maxima or minima
    static constexpr uint32_t digest_bytes = 2 * row_bytes;
    static constexpr uint32_t token_bytes = kChannels / 2;
    static constexpr uint32_t code_bytes = block_tokens * token_bytes;
    static constexpr uint32_t codes = octet_blocks * digest_bytes;  // where they begin
    static constexpr uint32_t bytes = codes + octet_blocks * code_bytes;
    static constexpr uint32_t step_bytes = octet_blocks * kChannels * 2;  // of a warp, beside its octets

    // Chunks of 16 bytes in a row change places, so that a matrix load finds those of eight blocks in different banks.
    static __device__ uint32_t place(uint32_t block, uint32_t in_digest) {
        return block * digest_bytes + (in_digest ^ block * 16);
    }

    // By one warp. Lane b has the page of block b, -1: zeros.
    static __device__ void request(uint32_t octet, const sh_digests& from, uint32_t head, int32_t page, uint64_t policy) {
        const uint32_t lane = threadIdx.x % 32;
        constexpr uint32_t digest_chunks = digest_bytes / 16, code_chunks = code_bytes / 16;
#pragma unroll
        for (uint32_t i = 0; i < octet_blocks * digest_chunks / 32; ++i) {
            const uint32_t chunk = i * 32 + lane, block = chunk / digest_chunks, in_block = chunk % digest_chunks * 16;
            const int32_t of = __shfl_sync(0xFFFFFFFF, page, block);
            const uint64_t at = (uint64_t{static_cast<uint32_t>(max(of, 0))} * from.kv_heads + head) * digest_bytes;
            copy_async(octet + place(block, in_block), static_cast<const char*>(from.digests) + at + in_block, of >= 0, policy);
        }
        if constexpr (kChannels > 0) {
#pragma unroll
            for (uint32_t i = 0; i < octet_blocks * code_chunks / 32; ++i) {
                const uint32_t chunk = i * 32 + lane, block = chunk / code_chunks, in_block = chunk % code_chunks * 16;
                const int32_t of = __shfl_sync(0xFFFFFFFF, page, block);
                const uint64_t at = (uint64_t{static_cast<uint32_t>(max(of, 0))} * from.kv_heads + head) * code_bytes;
                copy_async(octet + codes + chunk * 16, from.codes + at + in_block, of >= 0, policy);
            }
        }
    }
};

// -- steps of the codes ------------------------------------------------------------------------------------------------

// The channels of a KV head's sketch; lane c has the c-th, and the c + 32-th.
template <int kDim, int kChannels>
class SketchSteps {
  public:
    __device__ SketchSteps(const sh_digests& digests, uint32_t head, float scale)
        : factor_(scale * log2_of_e / 16.0f) {  // sixteen steps in a range
        if constexpr (kChannels > 0) {
#pragma unroll
            for (uint32_t part = 0; part < kChannels / 32; ++part) {
                const int64_t channel = digests.channels[uint64_t{head} * kChannels + part * 32 + threadIdx.x % 32];
                offset_[part] = (static_cast<uint32_t>(channel) & (kDim - 1)) * 2;
            }
        }
    }

    // Of an octet, in float16, in the order in which `add_tokens` reads them. `octet` and `steps` in shared memory.
    template <class Element>
    __device__ void write(const char* octet, char* steps) const {
        if constexpr (kChannels > 0) {
            using Here = Octet<kDim, kChannels>;
            const uint32_t lane = threadIdx.x % 32;
            // channels r and r + 4 of eight are a pair
            const uint32_t to = (lane / 8 * 8 + lane % 4 * 2 + lane % 8 / 4) * 2;
#pragma unroll
            for (uint32_t part = 0; part < kChannels / 32; ++part) {
#pragma unroll
                for (uint32_t block = 0; block < octet_blocks; ++block) {
                    const char* const highest = octet + Here::place(block, offset_[part]);
                    const float range = widened<Element>(*reinterpret_cast<const uint16_t*>(highest)) -
                                        widened<Element>(*reinterpret_cast<const uint16_t*>(highest + Here::row_bytes));
                    *reinterpret_cast<uint16_t*>(steps + block * kChannels * 2 + part * 64 + to) = to_half(range * factor_);
                }
            }
        }
    }

  private:
    const float factor_;
    uint32_t offset_[kChannels > 0 ? kChannels / 32 : 1];  // in a row of the digest
};

// -- eight query heads -------------------------------------------------------------------------------------------------

template <class Element, int kDim, int kChannels>
class HeadTile {
    using Here = Octet<kDim, kChannels>;
    static constexpr uint32_t dim_steps = kDim / 16;
    static constexpr uint32_t parts = kChannels / 32;

  public:
    // `query` of the tile's first head, of which there are `heads`, perhaps more than a tile takes.
    __device__ HeadTile(const void* query, uint32_t heads, const sh_digests& digests, uint32_t kv_head, float scale,
                        float spread)
        : scale_(scale * log2_of_e), toward_((1 + spread) / 2), away_((1 - spread) / 2) {
        const uint32_t i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
        const bool exists = i < heads;
        const auto* const row = static_cast<const uint16_t*>(query) + (exists ? i : 0) * kDim;
        const auto* const words = reinterpret_cast<const uint32_t*>(row);
#pragma unroll
        for (uint32_t step = 0; step < dim_steps; ++step) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) query_[step][half] = exists ? words[step * 8 + half * 4 + j] : 0;
        }
        if constexpr (kChannels > 0) {
            const int64_t* const channels = digests.channels + uint64_t{kv_head} * kChannels;
            const auto value = [&](uint32_t index) {
                const float wide = widened<Element>(row[static_cast<uint32_t>(channels[index]) & (kDim - 1)]);
                return exists ? fminf(fmaxf(wide, -65504.0f), 65504.0f) : 0.0f;
            };
#pragma unroll
            for (uint32_t part = 0; part < parts; ++part) {
#pragma unroll
                for (uint32_t r = 0; r < 4; ++r) {
                    const uint32_t first = part * 32 + j * 8 + r;
                    sketch_[part][r] = Float16::pack(value(first), value(first + 4));
                }
            }
        }
    }

    // Of block i by heads 2j and 2j + 1. Not finite where digests are not.
    __device__ float2 estimate(uint32_t octet, const char* steps) const {
        if constexpr (kChannels == 0) {
            return by_digests(octet);
        } else {
            const float2 middle = middles(octet);
            const float2 tokens = by_codes(octet, steps);
            return make_float2(tokens.x + middle.x, tokens.y + middle.y);
        }
    }

  private:
    // maxima and minima of eight blocks, 16 channels
    static __device__ void load_digests(uint32_t (&to)[4], uint32_t octet, uint32_t step) {
        const uint32_t lane = threadIdx.x % 32, block = lane & 7, kind = lane >> 3 & 1, half = lane >> 4;
        load_matrices(to, octet + Here::place(block, kind * Here::row_bytes + (2 * step + half) * 16));
    }

    __device__ float2 middles(uint32_t octet) const {
        float product[4] = {};
#pragma unroll
        for (uint32_t step = 0; step < dim_steps; ++step) {
            uint32_t digests[4];
            load_digests(digests, octet, step);
            Element::multiply_add(product, digests, query_[step][0], query_[step][1]);
        }
        return make_float2((product[0] + product[2]) * 0.5f * scale_, (product[1] + product[3]) * 0.5f * scale_);
    }

    // As if all 32 tokens of a block had the estimate. Positive and negative parts of a query want opposite extremes.
    __device__ float2 by_digests(uint32_t octet) const {
        float up[4] = {}, down[4] = {};
#pragma unroll
        for (uint32_t step = 0; step < dim_steps; ++step) {
            uint32_t digests[4];
            load_digests(digests, octet, step);
            uint32_t negative[2];
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) negative[half] = (query_[step][half] >> 15 & 0x00010001) * 0xFFFF;
            Element::multiply_add(up, digests, query_[step][0] & ~negative[0], query_[step][1] & ~negative[1]);
            Element::multiply_add(down, digests, query_[step][0] & negative[0], query_[step][1] & negative[1]);
        }
        const auto both = [&](uint32_t head) {
            return (toward_ * (up[head] + down[head + 2]) + away_ * (down[head] + up[head + 2])) * scale_ + 5.0f;
        };
        return make_float2(both(0), both(1));
    }

    // Eight codes of a word become pairs (r, r + 4) of float16, 64 larger than they are: the bits of a code are the
    // last four of the integer part of a number from 64 to 79.
    static __device__ void widen_codes(uint32_t (&pairs)[4], uint32_t word) {
        constexpr uint32_t codes = 0x00F000F0, sixty_four = 0x54005400;
        pairs[0] = masked_with(word << 4, codes, sixty_four);
        pairs[1] = masked_with(word, codes, sixty_four);
        pairs[2] = masked_with(word >> 4, codes, sixty_four);
        pairs[3] = masked_with(word >> 8, codes, sixty_four);
    }

    __device__ float2 by_codes(uint32_t octet, const char* steps) const {
        Mass mass[octet_blocks][2];
#pragma unroll
        for (uint32_t block = 0; block < octet_blocks; ++block) add_tokens(mass[block], octet, steps, block);
        exchange<octet_blocks / 2>(mass);
        exchange<octet_blocks / 4>(mass);
        exchange<octet_blocks / 8>(mass);
        return make_float2(mass[0][0].log2(), mass[0][1].log2());
    }

    // This lane's tokens of a block.
    __device__ void add_tokens(Mass (&mass)[2], uint32_t octet, const char* steps, uint32_t block) const {
        const uint32_t lane = threadIdx.x % 32;
        // codes are 64 too large, and their middle is 7.5
        const uint32_t offsets[4] = {0xD478D478, 0xD478D478, 0xD478D478, 0xD478D478};  // -71.5
        uint32_t weights[parts][4];
        float tokens[2][4] = {};
#pragma unroll
        for (uint32_t part = 0; part < parts; ++part) {
            const uint4 step = *reinterpret_cast<const uint4*>(steps + block * kChannels * 2 + part * 64 + lane % 4 * 16);
            weights[part][0] = multiply_halves(sketch_[part][0], step.x);
            weights[part][1] = multiply_halves(sketch_[part][1], step.y);
            weights[part][2] = multiply_halves(sketch_[part][2], step.z);
            weights[part][3] = multiply_halves(sketch_[part][3], step.w);
            Float16::multiply_add(tokens[0], offsets, weights[part][0], weights[part][1]);
            Float16::multiply_add(tokens[0], offsets, weights[part][2], weights[part][3]);
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) tokens[1][k] = tokens[0][k];
#pragma unroll
        for (uint32_t part = 0; part < parts; ++part) {
            uint32_t words[4];  // of tokens i, i + 8, i + 16, i + 24
            load_matrices(words, octet + Here::codes + block * Here::code_bytes + lane * Here::token_bytes + part * 16);
            uint32_t codes[4][4];
#pragma unroll
            for (uint32_t quarter = 0; quarter < 4; ++quarter) widen_codes(codes[quarter], words[quarter]);
#pragma unroll
            for (uint32_t r = 0; r < 4; r += 2) {
#pragma unroll
                for (uint32_t half = 0; half < 2; ++half) {  // in turn: a product waits for the one before on its sum
                    const uint32_t(&first)[4] = codes[2 * half];
                    const uint32_t(&second)[4] = codes[2 * half + 1];
                    const uint32_t both[4] = {first[r], second[r], first[r + 1], second[r + 1]};
                    Float16::multiply_add(tokens[half], both, weights[part][r], weights[part][r + 1]);
                }
            }
        }
#pragma unroll
        for (uint32_t head = 0; head < 2; ++head) {
            const float a = tokens[0][head], b = tokens[0][head + 2], c = tokens[1][head], d = tokens[1][head + 2];
            const float highest = fmaxf(fmaxf(a, b), fmaxf(c, d));
            mass[head] = {highest, fast_exp2(a - highest) + fast_exp2(b - highest) + fast_exp2(c - highest) +
                                       fast_exp2(d - highest)};
        }
    }

    // Of 2 * kKept blocks each lane keeps one half and gives the other to the lane that keeps that one.
    template <uint32_t kKept>
    static __device__ void exchange(Mass (&mass)[octet_blocks][2]) {
        const bool upper = threadIdx.x & 4 * kKept;
#pragma unroll
        for (uint32_t block = 0; block < kKept; ++block) {
#pragma unroll
            for (uint32_t head = 0; head < 2; ++head) {
                const Mass kept = upper ? mass[block + kKept][head] : mass[block][head];
                const Mass given = upper ? mass[block][head] : mass[block + kKept][head];
                mass[block][head] = kept.with(given.from_lane(4 * kKept));
            }
        }
    }

    const float scale_, toward_, away_;
    uint32_t query_[dim_steps][2];
    uint32_t sketch_[parts > 0 ? parts : 1][4];
};

}  // namespace sglang_hybrid::cuda
