// Codes of four or two bits as operands of the tensor cores.
//
// A lane has a word of eight channels of one token, or of two tokens, and makes pairs of float16 of it, each with two of
// these channels. No code is moved to a place of its own for that: its bits are the end of a number, or stand before some
// zeros of one, and the exponent says which. So numbers are too large by what they begin at, which is known, and by half of
// the largest code, which is the middle of the range. Three products with the weights of the channels take that away again:
//
//   weights of pairs 0 and 1, times a half of what is a half too much; the same, times the rest
//   weights of pairs 2 and 3, times all of it
#pragma once

#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

template <uint32_t kBits>
struct Codes;

template <>
struct Codes<4> {
    static constexpr uint32_t words = 4;  // of a lane and a block: of tokens i, i + 8, i + 16, i + 24
    static constexpr uint32_t steps = 1;  // of a sixteenth of the range, from one code to the next

    // The first channel of a pair; the other one is four further on.
    static constexpr __device__ uint32_t channel(uint32_t pair) { return pair % 2 * 2 + pair / 2; }

    static __device__ void widen(uint32_t (&tokens)[4][4], const uint32_t (&of_lane)[words]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t word = of_lane[i], upper = word >> 8;
            tokens[i][0] = masked_with(word, 0x000F000F, 0x64006400);   // from 1024 on
            tokens[i][1] = masked_with(upper, 0x000F000F, 0x64006400);
            tokens[i][2] = masked_with(word, 0x00F000F0, 0x54005400);   // from 64 on
            tokens[i][3] = masked_with(upper, 0x00F000F0, 0x54005400);
        }
    }
};

template <>
struct Codes<2> {
    static constexpr uint32_t words = 2;  // of tokens i and i + 16, and of tokens i + 8 and i + 24
    static constexpr uint32_t steps = 4;

    static constexpr __device__ uint32_t channel(uint32_t pair) { return pair; }

    static __device__ void widen(uint32_t (&tokens)[4][4], const uint32_t (&of_lane)[words]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t word = i < 2 ? of_lane[i] : of_lane[i - 2] >> 8;
            tokens[i][0] = masked_with(word, 0x00030003, 0x64006400);  // from 1024 on
            tokens[i][1] = masked_with(word, 0x000C000C, 0x5C005C00);  // from 256 on
            tokens[i][2] = masked_with(word, 0x00300030, 0x54005400);  // from 64 on
            tokens[i][3] = masked_with(word, 0x00C000C0, 0x4C004C00);  // from 16 on
        }
    }
};

// The matrices of the three products, whose rows are all alike. From memory, since the compiler makes what it knows anew for
// every product.
static __device__ const uint4 code_offsets[2][3] = {
    {
        {0x38003800, 0x38003800, 0x38003800, 0x38003800},  // 0.5
        {0xE408E408, 0xE408E408, 0xE408E408, 0xE408E408},  // -1032
        {0xD478D478, 0xD478D478, 0xD478D478, 0xD478D478},  // -71.5
    },
    {
        {0x38003800, 0x38003800, 0x00000000, 0x00000000},  // 0.5, 0
        {0xE402E402, 0xE402E402, 0xDC06DC06, 0xDC06DC06},  // -1026, -257.5
        {0xD418D418, 0xD418D418, 0xCC60CC60, 0xCC60CC60},  // -65.5, -17.5
    },
};

template <uint32_t kBits>
__device__ void load_code_offsets(uint32_t (&to)[3][4]) {
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
        const uint4 values = load_once(&code_offsets[kBits == 2][i]);
        to[i][0] = values.x, to[i][1] = values.y, to[i][2] = values.z, to[i][3] = values.w;
    }
}

}  // namespace sglang_hybrid::cuda
