// Estimates of blocks by queries: `sketch_logits` and `digest_logits` of the reference, on the tensor cores.
//
// A warp takes eight blocks (an octet) and eight query heads at a time. With lane = 4 * i + j:
//
//   digests   A (16 x D)   rows 0 to 7 are the maxima of blocks 0 to 7, rows 8 to 15 their minima
//             B (D x 8)    the queries              -> C: lane has block i's q . max and q . min of heads 2j, 2j + 1
//   codes     A (16 x C)   16 tokens of one block, four bits each turned into float16 (codes.cuh)
//             B (C x 8)    the queries, times the block's steps in those channels
//                          -> C: lane has tokens i, i + 8 of heads 2j, 2j + 1; twice for the 32 tokens of a block
//
// Where a product fills rows 0 to 7 only, its other rows may be anything.
//
// Each lane adds up the powers of its tokens. One more product adds the lanes of a block, and has block i where the product
// with the digests has it:
//
//   sums      A (16 x 16)  row b: ones in columns 0 to 7 for an even block b, 8 to 15 for an odd one; zeros elsewhere
//             B (16 x 8)   the lanes' sums of two blocks, turned: row = i, column = head
//
// Compact digests (compact.cuh) have the middles in bytes and the steps ready:
//
//   middles   A (16 x 16)  rows 0 to 7 are a group of channels of blocks 0 to 7, turned into float16
//             B (16 x 8)   the queries              -> C: lane has block i's products, which are scaled and added up
//
// Logits are in units of log2, the scale included. Tokens count relative to the middle of their block, without looking for
// the largest one first: a block's mass is limited to between 2^-126 and 2^126 times that of its middle.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/codes.cuh"
#include "sglang_hybrid/cuda/compact.cuh"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/mass.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/selection_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t octet_blocks = 8;
inline constexpr float log2_of_e = 1.4426950408889634f;

// constants, twice in a word
inline constexpr uint32_t bfloat16_ones = 0x3F803F80, bfloat16_2_to_123 = 0x7D007D00;
inline constexpr uint32_t minus_1152 = 0xE480E480;

// Return whether the pool has a page. Page tables and lists may hold any number.
__device__ inline bool has_page(const sh_digests& digests, int32_t page) {
    return page >= 0 && static_cast<uint32_t>(page) < digests.pages;
}

// -- eight blocks in shared memory -------------------------------------------------------------------------------------

template <int kDim, int kChannels, Format kFormat>
struct Octet {
    static constexpr bool is_compact = kFormat == Format::compact;
    static constexpr uint32_t row_bytes = kDim * 2;  // maxima or minima
    static constexpr uint32_t digest_bytes = is_compact ? compact_bytes(kDim, kChannels) : 2 * row_bytes;
    // Distance of digests in shared memory: an odd number of 16-byte chunks, so that a matrix load finds the chunks of eight
    // blocks in different banks.
    static constexpr uint32_t digest_stride = digest_bytes + 16;
    static constexpr uint32_t code_bytes = block_tokens * kChannels / 2;
    static constexpr uint32_t codes = octet_blocks * digest_stride;  // where the codes begin
    static constexpr uint32_t bytes = codes + octet_blocks * code_bytes;
    static constexpr uint32_t step_bytes = is_compact ? 0 : octet_blocks * kChannels * 2;  // of a warp, beside its octets
    static constexpr uint32_t step_stride = is_compact ? digest_stride : kChannels * 2;    // from block to block
    static_assert((!is_compact || kChannels > 0) && digest_stride / 16 % 2 == 1 && code_bytes % 128 == 0);

    static __device__ uint32_t place(uint32_t block, uint32_t in_digest) { return block * digest_stride + in_digest; }

    // Return the address of the codes' steps: in the digests, or where `SketchSteps` writes them.
    static __device__ const char* steps(const char* octet, const char* written) {
        return is_compact ? octet + compact_steps(kDim) : written;
    }

    // Begin the copies of an octet to shared memory. Lane b has the page of block b; where the pool has no such page, zeros are
    // written. Eight lanes copy 128 bytes of a block at a time; the block's address is computed once. Called by one warp.
    static __device__ void request(uint32_t octet, const sh_digests& from, uint32_t head, int32_t page, uint64_t policy) {
        const uint32_t lane = threadIdx.x % 32, first = lane % 8 * 16;
#pragma unroll
        for (uint32_t four = 0; four < octet_blocks; four += 4) {
            const uint32_t block = four + lane / 8;
            const int32_t of = __shfl_sync(0xFFFFFFFF, page, block);
            const bool is_there = has_page(from, of);
            // launchers check the range of such an index
            const uint32_t index = (is_there ? static_cast<uint32_t>(of) : 0) * from.kv_heads + head;
            const auto* const digest = static_cast<const char*>(from.digests) + uint64_t{index} * digest_bytes + first;
#pragma unroll
            for (uint32_t i = 0; i < digest_bytes; i += 128) {
                if (i + first < digest_bytes) copy_async(octet + place(block, first) + i, digest + i, is_there, policy);
            }
            if constexpr (code_bytes > 0) {
                const uint8_t* const code = from.codes + uint64_t{index} * code_bytes + first;
#pragma unroll
                for (uint32_t i = 0; i < code_bytes; i += 128) {
                    copy_async(octet + codes + block * code_bytes + first + i, code + i, is_there, policy);
                }
            }
        }
    }
};

// -- steps of the codes ------------------------------------------------------------------------------------------------

// The channels of a KV head's sketch; lane c has the c-th channel, and the c + 32-th.
template <int kDim, int kChannels, Format kFormat>
class SketchSteps {
  public:
    SketchSteps() = default;
    __device__ SketchSteps(const sh_digests& digests, uint32_t head, float scale)
        : factor_(scale * log2_of_e / 16.0f) {  // sixteen steps in a range
        if constexpr (kChannels > 0 && kFormat == Format::minmax) {
#pragma unroll
            for (uint32_t part = 0; part < kChannels / 32; ++part) {
                const int64_t channel = digests.channels[uint64_t{head} * kChannels + part * 32 + threadIdx.x % 32];
                offset_[part] = (static_cast<uint32_t>(channel) & (kDim - 1)) * 2;
            }
        }
    }

    // Write the steps of an octet of min/max digests in float16, in the order in which `load_steps` reads them. Octet and steps
    // are in shared memory.
    template <class Element>
    __device__ void write(const char* octet, char* steps) const {
        if constexpr (kChannels > 0 && kFormat == Format::minmax) {
            using Here = Octet<kDim, kChannels, kFormat>;
            const uint32_t to = step_place(threadIdx.x % 32) * 2;
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
    float factor_;
    uint32_t offset_[kChannels > 0 ? kChannels / 32 : 1];  // bytes from the beginning of a digest's row
};

// -- eight query heads -------------------------------------------------------------------------------------------------

template <class Element, int kDim, int kChannels, Format kFormat>
class HeadTile {
    using Here = Octet<kDim, kChannels, kFormat>;
    static constexpr uint32_t dim_steps = kDim / 16;
    static constexpr uint32_t parts = kChannels / 32;

  public:
    HeadTile() = default;
    // `query`: that of the tile's first head. `heads`: heads from there on, perhaps more than a tile takes.
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
            for (uint32_t half = 0; half < 2; ++half) {
                // a lane has four consecutive bytes of a group of middles, so its products take channels in that order
                const uint32_t word = words[step * 8 + (Here::is_compact ? 2 * j + half : half * 4 + j)];
                query_[step][half] = !exists ? 0 : Here::is_compact ? as_float16(word) : word;
            }
            if constexpr (Here::is_compact) {
                const uint32_t zeros[4] = {minus_1152, any_value(), minus_1152, any_value()};
                float product[4] = {};
                Float16::multiply_add(product, zeros, query_[step][0], query_[step][1]);
                zeros_[step][0] = product[0], zeros_[step][1] = product[1];
            }
        }
        if constexpr (kChannels > 0) {
            load_code_offsets(offsets_);
            const int64_t* const channels = digests.channels + uint64_t{kv_head} * kChannels;
            const float factor = Here::is_compact ? scale_ : 1.0f;  // steps of min/max digests include it already
            const auto value = [&](uint32_t index) {
                const float wide = widened<Element>(row[static_cast<uint32_t>(channels[index]) & (kDim - 1)]);
                return exists ? within_float16(wide * factor) : 0.0f;
            };
#pragma unroll
            for (uint32_t part = 0; part < parts; ++part) {
#pragma unroll
                for (uint32_t r = 0; r < 4; ++r) {
                    const uint32_t first = part * 32 + j * 8 + Codes::channel(r);
                    sketch_[part][r] = Float16::pack(value(first), value(first + 4));
                }
            }
        }
    }

    // Return the estimates of block i by heads 2j and 2j + 1. An estimate is not finite if the digest is not.
    __device__ float2 estimate(uint32_t octet, const char* steps) const {
        if constexpr (kChannels == 0) {
            return by_digests(octet);
        } else {
            const float2 tokens = by_codes(octet, steps), half = halves(steps), middle = middles(octet, steps);
            return make_float2(tokens.x + half.x + middle.x, tokens.y + half.y + middle.y);
        }
    }

  private:
    static __device__ float within_float16(float value) { return fminf(fmaxf(value, -65504.0f), 65504.0f); }
    static __device__ uint32_t as_float16(uint32_t pair) {
        return Float16::pack(within_float16(widened<Element>(static_cast<uint16_t>(pair))),
                             within_float16(widened<Element>(static_cast<uint16_t>(pair >> 16))));
    }

    // Load maxima and minima of eight blocks, 16 channels.
    static __device__ void load_digests(uint32_t (&to)[4], uint32_t octet, uint32_t step) {
        const uint32_t lane = threadIdx.x % 32, block = lane & 7, kind = lane >> 3 & 1, half = lane >> 4;
        load_matrices(to, octet + Here::place(block, kind * Here::row_bytes + (2 * step + half) * 16));
    }

    __device__ float2 middles(uint32_t octet, const char* steps) const {
        if constexpr (Here::is_compact) return compact_middles(octet, steps);
        float product[4] = {};
#pragma unroll
        for (uint32_t step = 0; step < dim_steps; ++step) {
            uint32_t digests[4];
            load_digests(digests, octet, step);
            Element::multiply_add(product, digests, query_[step][0], query_[step][1]);
        }
        return make_float2((product[0] + product[2]) * 0.5f * scale_, (product[1] + product[3]) * 0.5f * scale_);
    }

    // `steps` are in the same octet, and the scales follow them.
    __device__ float2 compact_middles(uint32_t octet, const char* steps) const {
        const uint32_t lane = threadIdx.x % 32;
        const char* const scales = steps + lane / 4 * Here::digest_stride + kChannels * 2;
        float2 middle{};
#pragma unroll
        for (uint32_t four = 0; four < dim_steps; four += 4) {
            uint32_t bytes[4];  // channels 4j to 4j + 3 of four groups
            load_matrices(bytes, octet + Here::place(lane & 7, (four + (lane >> 3)) * 16));
            const uint2 pairs = *reinterpret_cast<const uint2*>(scales + four * 2);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t group[4] = {halves_of_bytes<0>(bytes[i]), any_value(), halves_of_bytes<2>(bytes[i]),
                                           any_value()};
                float product[4] = {};
                Float16::multiply_add(product, group, query_[four + i][0], query_[four + i][1]);
                const uint32_t pair = i < 2 ? pairs.x : pairs.y;
                const float scale = widened<Float16>(static_cast<uint16_t>(i % 2 ? pair >> 16 : pair));
                middle.x += (product[0] + zeros_[four + i][0]) * scale;
                middle.y += (product[1] + zeros_[four + i][1]) * scale;
            }
        }
        return make_float2(middle.x * scale_, middle.y * scale_);
    }

    // Estimate by digests, as if all 32 tokens of a block had the estimate. Positive and negative parts of a query need
    // opposite extremes.
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

    // Return the logarithms of the blocks' sums. Two blocks are computed at a time: a product waits for the product before it
    // on the same sum, so there are always products on different sums under way, and those of the next two blocks begin before
    // the powers of these two.
    __device__ float2 by_codes(uint32_t octet, const char* steps) const {
        const uint32_t i = threadIdx.x % 32 / 4;
        float sums[4] = {};
        Weights weights[2];
        uint32_t words[2][parts][Codes::words];
        float tokens[2][2][4];  // of a block: tokens i and i + 8, then i + 16 and i + 24
        begin_pair(weights, steps, 0);
        Codes::load(words, octet + Here::codes);
#pragma unroll
        for (uint32_t block = 0; block < octet_blocks; block += 2) {
            multiply_codes(tokens, words, weights);
            if (block + 2 < octet_blocks) {
                begin_pair(weights, steps, block + 2);
                Codes::load(words, octet + Here::codes + (block + 2) * Here::code_bytes);
            }
            const uint32_t rows[4] = {i == block ? bfloat16_ones : 0, any_value(), i == block + 1 ? bfloat16_ones : 0,
                                      any_value()};
            BFloat16::multiply_add(sums, rows, transposed_matrix(powers(tokens[0])), transposed_matrix(powers(tokens[1])));
        }
        return make_float2(fmaxf(fast_log2(sums[0]), -126.0f), fmaxf(fast_log2(sums[1]), -126.0f));
    }

    // Operands of a block's sketch: queries times steps, and the values that sums of tokens begin with.
    struct Weights {
        uint32_t of[parts > 0 ? parts : 1][4];
        float begin[4];
    };

    static __device__ uint4 load_steps(const char* steps, uint32_t block, uint32_t part) {
        return *reinterpret_cast<const uint4*>(steps + block * Here::step_stride + part * 64 + threadIdx.x % 4 * 16);
    }

    __device__ void begin_pair(Weights (&weights)[2], const char* steps, uint32_t block) const {
#pragma unroll
        for (uint32_t part = 0; part < parts; ++part) {
#pragma unroll
            for (uint32_t b = 0; b < 2; ++b) {
                const uint4 read = load_steps(steps, block + b, part);
                const uint32_t of_channels[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
                for (uint32_t r = 0; r < 4; ++r) {
                    weights[b].of[part][r] = multiply_halves(sketch_[part][r], of_channels[Codes::channel(r)]);
                }
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) weights[0].begin[i] = weights[1].begin[i] = 0;
#pragma unroll
        for (uint32_t part = 0; part < parts; ++part) {
#pragma unroll
            for (uint32_t r = 0; r < 4; r += 2) {
#pragma unroll
                for (uint32_t b = 0; b < 2; ++b) {
                    const uint32_t (&of)[4] = weights[b].of[part];
                    Float16::multiply_add(weights[b].begin, offsets_[r / 2], of[r], of[r + 1]);
                }
            }
        }
    }

    static __device__ void multiply_codes(float (&tokens)[2][2][4], const uint32_t (&words)[2][parts][Codes::words],
                                          const Weights (&weights)[2]) {
#pragma unroll
        for (uint32_t part = 0; part < parts; ++part) {
            uint32_t codes[2][4][4];  // of tokens i, i + 8, i + 16, i + 24
            Codes::widen(codes[0], words[0][part]);
            Codes::widen(codes[1], words[1][part]);
#pragma unroll
            for (uint32_t r = 0; r < 4; r += 2) {
#pragma unroll
                for (uint32_t b = 0; b < 2; ++b) {
#pragma unroll
                    for (uint32_t half = 0; half < 2; ++half) {
                        const uint32_t (&first)[4] = codes[b][2 * half];
                        const uint32_t (&second)[4] = codes[b][2 * half + 1];
                        const uint32_t both[4] = {first[r], second[r], first[r + 1], second[r + 1]};
                        const uint32_t (&of)[4] = weights[b].of[part];
                        if (part == 0 && r == 0) {
                            Float16::multiply_add(tokens[b][half], both, of[r], of[r + 1], weights[b].begin);
                        } else {
                            Float16::multiply_add(tokens[b][half], both, of[r], of[r + 1]);
                        }
                    }
                }
            }
        }
    }

    // Return the sum of the powers of this lane's tokens of a block, for two heads in bfloat16, which has the range of float32.
    // The sum is at most 2^123, so that the sum of eight lanes is finite. It is never NaN or infinite: zeros times these would
    // reach the other blocks.
    static __device__ uint32_t powers(const float (&tokens)[2][4]) {
        const auto sum = [&](uint32_t head) {
            const float first = fast_exp2(tokens[0][head]) + fast_exp2(tokens[0][head + 2]);
            const float second = fast_exp2(tokens[1][head]) + fast_exp2(tokens[1][head + 2]);
            return first + second;
        };
        return lower_bfloat16(BFloat16::pack(sum(0), sum(1)), bfloat16_2_to_123);
    }

    // Return by how much tokens of block i are too low: half of a step in channels whose codes begin at 1024.
    __device__ float2 halves(const char* steps) const {
        float product[4] = {};
#pragma unroll
        for (uint32_t part = 0; part < parts; ++part) {
            const uint4 read = load_steps(steps, threadIdx.x % 32 / 4, part);
            const uint32_t of_channels[4] = {read.x, read.y, read.z, read.w};
            const uint32_t rows[4] = {of_channels[Codes::channel(0)], any_value(), of_channels[Codes::channel(1)], any_value()};
            Float16::multiply_add(product, rows, sketch_[part][0], sketch_[part][1]);
        }
        return make_float2(product[0] * 0.5f, product[1] * 0.5f);
    }

    float scale_, toward_, away_;
    uint32_t query_[dim_steps][2];
    float zeros_[Here::is_compact ? dim_steps : 1][2];  // products with bytes of 128, which stand for 0, negated
    uint32_t sketch_[parts > 0 ? parts : 1][4];
    uint32_t offsets_[2][4];  // by what codes are too large, negated
};

}  // namespace sglang_hybrid::cuda
