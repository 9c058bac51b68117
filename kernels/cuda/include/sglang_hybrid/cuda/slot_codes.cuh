// Codes of 8 bits in which slots can keep keys and values: a number is its code, a whole number from -127 to 127, times the step
// of its channel. Steps come from calibration, one for each channel of a KV head, so a channel whose numbers are all large takes
// nothing from the others. Numbers beyond a channel's range get its last code; NaN gets the lowest.
//
// Attention multiplies the query by the steps of the keys, and its output by those of the values. In between it computes with
// codes, which float16 has exactly.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/fp8.cuh"
#include "sglang_hybrid/cuda/halves.cuh"

namespace sglang_hybrid::cuda {

inline constexpr float most_code = 127;
inline constexpr float code_zero = 128;  // the byte that stands for 0

// Steps of one KV head, [head_dim], and their reciprocals, because a division takes longer than everything else that makes a
// number a code. Null: slots keep numbers as the pool does.
struct CodeSteps {
    const float* keys;
    const float* values;
    const float* per_key_step;
    const float* per_value_step;

    // `steps`: [4][kv_heads][head_dim], those of keys and of values, reciprocals of both; or null.
    __device__ CodeSteps(const float* steps, uint32_t kv_heads, uint32_t head_dim, uint32_t head)
        : keys(part(steps, 0, kv_heads, head_dim, head)), values(part(steps, 1, kv_heads, head_dim, head)),
          per_key_step(part(steps, 2, kv_heads, head_dim, head)), per_value_step(part(steps, 3, kv_heads, head_dim, head)) {}
    __device__ CodeSteps() : keys(nullptr), values(nullptr), per_key_step(nullptr), per_value_step(nullptr) {}

  private:
    static __device__ const float* part(const float* steps, uint32_t part, uint32_t kv_heads, uint32_t head_dim,
                                        uint32_t head) {
        return steps ? steps + (part * kv_heads + head) * head_dim : nullptr;
    }
};

// -- reading -----------------------------------------------------------------------------------------------------------

// Element type of kernels over slots of codes, whatever the dtype of the queries.
struct Coded {
    static constexpr float unit = 1.0f;

    // Convert the four codes of a word to two pairs of float16: bytes 0 and 1, and bytes 2 and 3.
    static __device__ void widen(uint32_t (&pairs)[2], uint32_t word) {
        pairs[0] = around_zero(halves_of_bytes<0>(word)), pairs[1] = around_zero(halves_of_bytes<2>(word));
    }

    // As `widen`, with the pairs bytes 0 and 2, and bytes 1 and 3.
    static __device__ void widen_across(uint32_t (&pairs)[2], uint32_t word) { widen(pairs, __byte_perm(word, 0, 0x3120)); }

  private:
    static __device__ uint32_t around_zero(uint32_t pair) { return subtract_halves(pair, 0x64806480); }  // 1024 + 128
};

template <>
inline constexpr uint32_t value_bytes<Coded> = 1;

template <class Element>
inline constexpr bool is_coded = std::is_same_v<Element, Coded>;

// -- writing -----------------------------------------------------------------------------------------------------------

// Return a word whose lowest byte is the code of `value`: added to so large a float32, a number is rounded to a whole one, whose
// bits are the lowest of the sum.
__device__ inline uint32_t byte_of(float value, float per_step) {
    constexpr float whole_numbers = 12582912;  // 1.5 * 2^23: sums with up to 2^22 more or less are whole numbers
    return __float_as_uint(fminf(fmaxf(value * per_step, -most_code), most_code) + (whole_numbers + code_zero));
}

// Conversions of eight channels, the first of them `channel`, between the pool and slots. `steps`: of all channels of the head;
// `per_step`: reciprocals of the steps.
template <class Element, class Stored, bool kCoded>
struct SlotEight {
    using Bits = typename Eight<Element, Stored>::Bits;
    static __device__ Bits of_pool(Bits bits, const float*, uint32_t) { return bits; }
    static __device__ uint4 widened(Bits bits, const float*, uint32_t) { return Eight<Element, Stored>::widened(bits); }
};

template <class Element>
struct SlotEight<Element, Element, true> {
    using Bits = uint2;

    static __device__ Bits of_pool(uint4 numbers, const float* per_step, uint32_t channel) {
        const auto* const eight = reinterpret_cast<const float4*>(per_step + channel);
        return {codes(numbers.x, numbers.y, eight[0]), codes(numbers.z, numbers.w, eight[1])};
    }
    static __device__ uint4 widened(Bits codes, const float* steps, uint32_t channel) {
        steps += channel;
        return {numbers(codes.x, steps), numbers(codes.x >> 16, steps + 2), numbers(codes.y, steps + 4),
                numbers(codes.y >> 16, steps + 6)};
    }

  private:
    static __device__ uint32_t codes(uint32_t first, uint32_t second, const float4& per_step) {
        return __byte_perm(codes(first, per_step.x, per_step.y), codes(second, per_step.z, per_step.w), 0x5410);
    }
    // in the two lowest bytes
    static __device__ uint32_t codes(uint32_t pair, float per_step, float next_per_step) {
        return __byte_perm(byte_of(cuda::widened<Element>(static_cast<uint16_t>(pair)), per_step),
                           byte_of(cuda::widened<Element>(static_cast<uint16_t>(pair >> 16)), next_per_step), 0x0040);
    }
    static __device__ uint32_t numbers(uint32_t bytes, const float* steps) {
        return Element::pack((float(bytes & 0xFF) - code_zero) * steps[0], (float(bytes >> 8 & 0xFF) - code_zero) * steps[1]);
    }
};

}  // namespace sglang_hybrid::cuda
