// Queries for products over numbers of one byte, which are float16 products: a power of two for each query head brings a query
// of bfloat16, or one that was multiplied by the steps of codes, into float16's range.
#pragma once

#include "sglang_hybrid/cuda/attend_tiles.cuh"

namespace sglang_hybrid::cuda {

// The power of two that brings the largest exponent of a query to 14, and its inverse. bfloat16 has fewer mantissa bits than
// float16, so numbers down to 2^-31 times the largest stay exact, and smaller ones nearly so. Infinities and NaN stay.
struct QueryFactor {
    uint32_t bits;  // exponent bits of into_range()

    // `largest`: the upper half of the bits of the largest number as a float32, without its sign.
    __device__ explicit QueryFactor(uint32_t largest) : bits(min(127 + 14 + 127 - (largest >> 7), 253u)) {}
    __device__ float into_range() const { return __uint_as_float(bits << 23); }
    __device__ float back() const { return __uint_as_float((254 - bits) << 23); }
};

// Write the queries [query_rows][kDim] to shared memory, zeros behind the last head, and for each row the factor that its
// products have to be multiplied by. `steps`: [kDim], by which channels are multiplied; or null. Of each 16 channels, a lane of
// the tensor cores has four consecutive ones, since these are a word of keys: channels 4j and 4j + 1 are its columns 2j and
// 2j + 1, and the next two are 2j + 8 and 2j + 9. Called by a whole CTA.
template <int kDim>
__device__ void write_scaled_queries(const void* queries, uint32_t group, bool is_bfloat16, const float* steps, char* to,
                                     float* factors) {
    constexpr uint32_t words = kDim / 2, of_lane = (words + warp_size - 1) / warp_size;
    const uint32_t warps = blockDim.x / warp_size, warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    const bool is_scaled = is_bfloat16 || steps;
    const auto number = [&](uint32_t bits, uint32_t channel) {
        const auto one = static_cast<uint16_t>(bits);
        return (is_bfloat16 ? widened<BFloat16>(one) : widened<Float16>(one)) * (steps ? steps[channel] : 1.0f);
    };
    for (uint32_t row = warp; row < query_rows; row += warps) {
        uint32_t mine[of_lane], largest = 0;
        float2 numbers[of_lane];
#pragma unroll
        for (uint32_t i = 0; i < of_lane; ++i) {
            const uint32_t word = i * warp_size + lane;
            const bool exists = row < group && word < words;
            mine[i] = exists ? __ldcg(static_cast<const uint32_t*>(queries) + row * words + word) : 0;
            if (!is_scaled || !exists) continue;
            numbers[i] = make_float2(number(mine[i], 2 * word), number(mine[i] >> 16, 2 * word + 1));
            const uint32_t both = max(__float_as_uint(fabsf(numbers[i].x)), __float_as_uint(fabsf(numbers[i].y)));
            largest = max(largest, both >> 16);
        }
        const QueryFactor factor(__reduce_max_sync(0xFFFFFFFF, largest));
        if (lane == 0) factors[row] = is_scaled ? factor.back() : 1.0f;
#pragma unroll
        for (uint32_t i = 0; i < of_lane; ++i) {
            const uint32_t word = i * warp_size + lane;
            if (word >= words) continue;
            if (is_scaled && row < group) {
                mine[i] = Float16::pack(numbers[i].x * factor.into_range(), numbers[i].y * factor.into_range());
            }
            const uint32_t in_chunks = word % 8;
            const uint32_t at = Tile<kDim>::place(row, word / 8 * 2 + in_chunks % 2) + in_chunks / 2 * sizeof(uint32_t);
            *reinterpret_cast<uint32_t*>(to + at) = mine[i];
        }
    }
}

}  // namespace sglang_hybrid::cuda
