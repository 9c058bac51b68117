// Where codes of two, three or four bits are in a block's memory: `sketch_codes` of the reference. codes.cuh reads them.
//
//   4 bits   [token][C / 2 bytes]     a byte has two channels of a token
//   2 bits   [16][C / 2 bytes]        a byte has four channels; those of tokens t and t + 16 take turns
//   3 bits   [C / 32][96 words]       words 0 and 1 of each of 32 lanes, then word 2 of each
//
// Of three bits, lane 4 * i + j has tokens i, i + 8, i + 16, i + 24 (0 to 3 here) and channels 8j to 8j + 7 of 32. The lower
// half of a word has channels 8j to 8j + 3 (r = 0 to 3), the upper half the four behind them in the same places:
//
//   bits      0 to 2        3 to 5        6 to 8        9 to 11       12 to 14      15
//   word 0    token 0, r 0  token 0, r 1  token 0, r 2  token 3, r 1  token 3, r 2  the lowest bit of token 3, r 0
//   word 1    token 1, r 0  token 1, r 1  token 1, r 2  token 0, r 3  token 1, r 3  the next
//   word 2    token 2, r 0  token 2, r 1  token 2, r 2  token 2, r 3  token 3, r 3  the highest
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid::cuda {

// How many channels must be a multiple of.
constexpr __host__ __device__ uint32_t code_channels(uint32_t bits) {
    return bits == 4 ? 2 : bits == 3 ? 32 : bits == 2 ? 8 : UINT32_MAX;
}

// What `write_codes` writes at a time: bytes, or words of three bits.
__device__ inline uint32_t code_units(uint32_t bits, uint32_t channels) {
    return block_tokens * channels * bits / 8 / (bits == 3 ? 4 : 1);
}

struct ThreeBitPlace {
    uint8_t token, pair;
};
inline constexpr uint32_t three_bit_words = 3, three_bit_places = 5;

__device__ inline ThreeBitPlace three_bit_place(uint32_t word, uint32_t place) {
    const auto own = static_cast<uint8_t>(word);
    if (place < 3) return {own, static_cast<uint8_t>(place)};
    if (word == 0) return {3, static_cast<uint8_t>(place - 2)};
    if (place == 3) return {static_cast<uint8_t>(word == 1 ? 0 : 2), 3};
    return {static_cast<uint8_t>(word == 1 ? 1 : 3), 3};
}

// Unit `unit` of a block; code(token, channel of the sketch).
template <class Code>
__device__ void write_codes(uint8_t* codes, uint32_t unit, uint32_t bits, uint32_t channels, Code code) {
    if (bits == 3) {
        constexpr uint32_t lanes = 32, of_part = three_bit_words * lanes;
        const uint32_t part = unit / of_part, at = unit % of_part;
        const uint32_t lane = at < 2 * lanes ? at / 2 : at - 2 * lanes, word = at < 2 * lanes ? at % 2 : 2;
        const uint32_t first = part * 32 + lane % 4 * 8;
        uint32_t all = 0;
        for (uint32_t half = 0; half < 2; ++half) {
            const auto of_pair = [&](uint32_t token, uint32_t pair) {
                return code(lane / 4 + 8 * token, first + pair + 4 * half);
            };
            for (uint32_t place = 0; place < three_bit_places; ++place) {
                const ThreeBitPlace what = three_bit_place(word, place);
                all |= of_pair(what.token, what.pair) << (16 * half + 3 * place);
            }
            all |= (of_pair(3, 0) >> word & 1) << (16 * half + 15);
        }
        reinterpret_cast<uint32_t*>(codes)[unit] = all;
        return;
    }
    const uint32_t row = unit / (channels / 2), in_row = unit % (channels / 2);
    const uint32_t token = bits == 4 ? row : row + in_row % 2 * (block_tokens / 2);
    const uint32_t first = bits == 4 ? in_row * 2 : in_row / 2 * 4;
    uint32_t all = 0;
    for (uint32_t i = 0; i < 8 / bits; ++i) all |= code(token, first + i) << (bits * i);
    codes[unit] = static_cast<uint8_t>(all);
}

}  // namespace sglang_hybrid::cuda
