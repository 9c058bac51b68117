// Codes of two to four bits as operands of the tensor cores. Where they are in memory: code_words.cuh.
//
// A lane has eight channels of four tokens, and makes pairs of float16 of them, each with two channels. No code is moved to
// a place of its own for that: its bits are the end of a number, or stand before some zeros of one, and the exponent says
// which. So numbers are too large by what they begin at, which is known, and by half of the largest code, which is the middle
// of the range. Two products take that away again, exactly: of the weights of pairs 0 and 1, and of those of pairs 2 and 3.
// Numbers from 1024 on leave no room for a half, which stays for those who have the sum of a block's tokens: it is the same
// for all of them.
#pragma once

#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

// Numbers from 1024, 256, 128, 64 or 16 on, twice, whose last bits, or those before two, three, four or six zeros, are zeros.
inline constexpr uint32_t from_1024 = 0x64006400, from_256 = 0x5C005C00, from_128 = 0x58005800, from_64 = 0x54005400,
                          from_16 = 0x4C004C00;

// load: this lane's words of two blocks that follow each other. widen: pairs [token i, i + 8, i + 16, i + 24][pair].
template <uint32_t kBits>
struct Codes;

template <>
struct Codes<4> {
    static constexpr uint32_t words = 4;  // of a lane and a block, of 32 channels: one for each token
    static constexpr uint32_t steps = 1;  // of a sixteenth of the range, from one code to the next
    static constexpr uint32_t from_1024_on = 2;  // pairs, the first ones, that begin at 1024

    // The first channel of a pair; the other one is four further on.
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

template <>
struct Codes<3> {
    static constexpr uint32_t words = 3;
    static constexpr uint32_t steps = 2;
    static constexpr uint32_t from_1024_on = 1;

    static constexpr __device__ uint32_t channel(uint32_t pair) { return pair; }

    template <uint32_t kParts>
    static __device__ void load(uint32_t (&to)[2][kParts][words], uint32_t at) {
        constexpr uint32_t of_part = 32 * words * 4;
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (uint32_t i = 0; i < 2 * kParts; ++i) {
            uint32_t(&here)[words] = to[i / kParts][i % kParts];
            const uint2 two = load_shared_pair(at + i * of_part + lane * 8);
            here[0] = two.x, here[1] = two.y;
            here[2] = load_shared(at + i * of_part + 256 + lane * 4);
        }
    }

    static __device__ void widen(uint32_t (&tokens)[4][4], const uint32_t (&of_lane)[words]) {
        constexpr uint32_t last = 0x00070007, middle = 0x00380038, first = 0x01C001C0;
        uint32_t upper[words];
#pragma unroll
        for (uint32_t i = 0; i < words; ++i) {
            upper[i] = of_lane[i] >> 6;
            tokens[i][0] = masked_with(of_lane[i], last, from_1024);
            tokens[i][1] = masked_with(of_lane[i], middle, from_128);
            tokens[i][2] = masked_with(of_lane[i], first, from_16);
        }
        const uint32_t lowest_bit = masked_with(of_lane[0] >> 15, 0x00010001, from_1024);
        tokens[3][0] = masked_with(of_lane[2] >> 13, 0x00040004, masked_with(of_lane[1] >> 14, 0x00020002, lowest_bit));
        tokens[3][1] = masked_with(upper[0], middle, from_128);
        tokens[3][2] = masked_with(upper[0], first, from_16);
        tokens[0][3] = masked_with(upper[1], middle, from_128);
        tokens[1][3] = masked_with(upper[1], first, from_16);
        tokens[2][3] = masked_with(upper[2], middle, from_128);
        tokens[3][3] = masked_with(upper[2], first, from_16);
    }
};

template <>
struct Codes<2> {
    static constexpr uint32_t words = 2;  // of tokens i and i + 16, and of tokens i + 8 and i + 24
    static constexpr uint32_t steps = 4;
    static constexpr uint32_t from_1024_on = 1;

    static constexpr __device__ uint32_t channel(uint32_t pair) { return pair; }

    template <uint32_t kParts>
    static __device__ void load(uint32_t (&to)[2][kParts][words], uint32_t at) {
        constexpr uint32_t row = kParts * 16;  // 16 of them are a block
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
            uint32_t loaded[4];
            load_matrices(loaded, at + threadIdx.x % 32 * row + part * 16);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) to[i / words][part][i % words] = loaded[i];
        }
    }

    static __device__ void widen(uint32_t (&tokens)[4][4], const uint32_t (&of_lane)[words]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t word = i < 2 ? of_lane[i] : of_lane[i - 2] >> 8;
            tokens[i][0] = masked_with(word, 0x00030003, from_1024);
            tokens[i][1] = masked_with(word, 0x000C000C, from_256);
            tokens[i][2] = masked_with(word, 0x00300030, from_64);
            tokens[i][3] = masked_with(word, 0x00C000C0, from_16);
        }
    }
};

// The matrices of the two products. Their rows are alike, but where tokens i and i + 16 have other numbers than i + 8 and
// i + 24: pair 3 of three bits. From memory, since the compiler makes what it knows anew for every product.
static __device__ const uint4 code_offsets[3][2] = {
    {
        {0xE402E402, 0xE402E402, 0xDC06DC06, 0xDC06DC06},  // -1026, -257.5
        {0xD418D418, 0xD418D418, 0xCC60CC60, 0xCC60CC60},  // -65.5, -17.5
    },
    {
        {0xE404E404, 0xE404E404, 0xD81CD81C, 0xD81CD81C},  // -1028, -131.5
        {0xCCE0CCE0, 0xCCE0CCE0, 0xD81CD81C, 0xCCE0CCE0},  // -19.5, -131.5 and -19.5
    },
    {
        {0xE408E408, 0xE408E408, 0xE408E408, 0xE408E408},  // -1032
        {0xD478D478, 0xD478D478, 0xD478D478, 0xD478D478},  // -71.5
    },
};

template <uint32_t kBits>
__device__ void load_code_offsets(uint32_t (&to)[2][4]) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint4 values = load_once(&code_offsets[kBits - 2][i]);
        to[i][0] = values.x, to[i][1] = values.y, to[i][2] = values.z, to[i][3] = values.w;
    }
}

}  // namespace sglang_hybrid::cuda
