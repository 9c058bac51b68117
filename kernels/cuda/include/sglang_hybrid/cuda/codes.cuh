// Codes of four bits as operands of the tensor cores. In memory codes are [token][C / 2 bytes], with two channels of a token in
// a byte.
//
// A lane has eight channels of four tokens, and makes pairs of float16 from them, with two channels in a pair. Codes are not
// shifted for that: the bits of a code are the last bits of a float16 number, or stand before four zeros at its end, and the
// exponent (1024 or 64) says which. So these numbers are too large by the number that they begin at, which is known, and by
// half of the largest code, which is the middle of the range. Two products subtract both again, exactly: one of the weights of
// pairs 0 and 1, one of the weights of pairs 2 and 3. Numbers from 1024 on cannot represent a half. This half of a step
// is added to the sum of a block's tokens (`halves` of estimates.cuh), since it is the same for all tokens of the block.
#pragma once

#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

// The float16 numbers 1024 and 64, twice in a word. A code becomes the last four bits of numbers from 1024 on, and the four
// bits before the last four of numbers from 64 on.
inline constexpr uint32_t from_1024 = 0x64006400, from_64 = 0x54005400;

// `load` loads this lane's words of two consecutive blocks. `widen` converts the words of a block to pairs of float16, [token
// i, i + 8, i + 16, i + 24][pair].
struct Codes {
    static constexpr uint32_t words = 4;  // of a lane, for a block and 32 channels: one for each of its tokens

    // Return the first channel of a pair; the second one is four channels further on.
    static constexpr __device__ uint32_t channel(uint32_t pair) { return pair % 2 * 2 + pair / 2; }

    template <uint32_t kParts>
    static __device__ void load(uint32_t (&to)[2][kParts][words], uint32_t at) {
        constexpr uint32_t row = kParts * 16;
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
#pragma unroll
            for (uint32_t block = 0; block < 2; ++block) {
                load_matrices(to[block][part], at + block * 32 * row + threadIdx.x % 32 * row + part * 16);
            }
        }
    }

    static __device__ void widen(uint32_t (&tokens)[4][4], const uint32_t (&of_lane)[words]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t word = of_lane[i], upper = word >> 8;
            tokens[i][0] = masked_with(word, 0x000F000F, from_1024);
            tokens[i][1] = masked_with(upper, 0x000F000F, from_1024);
            tokens[i][2] = masked_with(word, 0x00F000F0, from_64);
            tokens[i][3] = masked_with(upper, 0x00F000F0, from_64);
        }
    }
};

// The rows of the matrices of the two products. They are loaded from memory, since the compiler would make constants anew for
// every product.
static __device__ const uint4 code_offsets[2] = {
    {0xE408E408, 0xE408E408, 0xE408E408, 0xE408E408},  // -1032
    {0xD478D478, 0xD478D478, 0xD478D478, 0xD478D478},  // -71.5
};

__device__ inline void load_code_offsets(uint32_t (&to)[2][4]) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint4 values = load_once(&code_offsets[i]);
        to[i][0] = values.x, to[i][1] = values.y, to[i][2] = values.z, to[i][3] = values.w;
    }
}

}  // namespace sglang_hybrid::cuda
