// Codes of 8 bits in which slots can keep keys and values: a number is its code, a whole number from -127 to 127, times the step
// of its channel, times the factor of its token. Steps come from calibration, one for each channel of a KV head, so a channel
// whose numbers are all large takes nothing from the others. The factor makes the token's largest code 127, whatever texts the
// calibration has seen. Numbers beyond most_factor times a channel's range get its last code; NaN gets the lowest.
//
// Attention multiplies the query by the steps of the keys, and its output by those of the values; logits by the factors of the
// keys, and weights by those of the values. In between it computes with codes, which float16 has exactly.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/fp8.cuh"
#include "sglang_hybrid/cuda/halves.cuh"

namespace sglang_hybrid::cuda {

inline constexpr float most_code = 127;
inline constexpr float code_zero = 128;  // the byte that stands for 0
// Of factors, float16. The least one is its smallest normal number. A number far beyond its channel's range must not leave
// nothing of the token's other channels.
inline constexpr float least_factor = 0x1p-14f, most_factor = 4;
inline constexpr uint32_t slot_factors = 2 * block_tokens;  // of a slot: of the tokens' keys, then of their values

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

// Return a word whose lowest byte is the code `value * factor`: added to so large a float32, a number is rounded to a whole one,
// whose bits are the lowest of the sum.
__device__ inline uint32_t byte_of(float value, float factor) {
    constexpr float whole_numbers = 12582912;  // 1.5 * 2^23: sums with up to 2^22 more or less are whole numbers
    return __float_as_uint(fminf(fmaxf(value * factor, -most_code), most_code) + (whole_numbers + code_zero));
}

// The lanes that hold a token's channels, eight each: `count` lanes side by side, a power of two.
struct TokenLanes {
    uint32_t count;

    __device__ uint32_t own() const { return threadIdx.x % count; }
    __device__ float largest(float value) const {
        for (uint32_t step = count / 2; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
        return value;
    }
};

// Conversions of a lane's eight channels of a token between the pool and slots. `steps`: of all channels of the head;
// `per_step`: reciprocals of the steps. `factor`: where the token has its factor; null in lanes without a token. `of_pool` is
// called by whole warps.
template <class Element, class Stored, bool kCoded>
struct SlotEight {
    using Bits = typename Eight<Element, Stored>::Bits;
    static __device__ Bits of_pool(Bits bits, const float*, TokenLanes, uint16_t*) { return bits; }
    static __device__ uint4 widened(Bits bits, const float*, TokenLanes, const uint16_t*) {
        return Eight<Element, Stored>::widened(bits);
    }
};

template <class Element>
struct SlotEight<Element, Element, true> {
    using Bits = uint2;

    // Also writes the token's factor.
    static __device__ Bits of_pool(uint4 numbers, const float* per_step, TokenLanes lanes, uint16_t* factor) {
        const auto* const of_lane = reinterpret_cast<const float4*>(per_step + lanes.own() * 8);
        const float4 first = of_lane[0], second = of_lane[1];
        const float levels[8] = {half_of(numbers.x, 0) * first.x,  half_of(numbers.x, 16) * first.y,
                                 half_of(numbers.y, 0) * first.z,  half_of(numbers.y, 16) * first.w,
                                 half_of(numbers.z, 0) * second.x, half_of(numbers.z, 16) * second.y,
                                 half_of(numbers.w, 0) * second.z, half_of(numbers.w, 16) * second.w};
        float largest = 0;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(levels[i]));  // NaN does not count
        const float exact = fminf(fmaxf(lanes.largest(largest) / most_code, least_factor), most_factor);
        const auto bits = static_cast<uint16_t>(Float16::pack(rounded_up(exact), 0));
        if (lanes.own() == 0 && factor) *factor = bits;
        const float per_factor = 1.0f / cuda::widened<Float16>(bits);
        uint32_t bytes[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) bytes[i] = byte_of(levels[i], per_factor);
        return {word(bytes[0], bytes[1], bytes[2], bytes[3]), word(bytes[4], bytes[5], bytes[6], bytes[7])};
    }
    static __device__ uint4 widened(Bits codes, const float* steps, TokenLanes lanes, const uint16_t* factor) {
        const float of_token = cuda::widened<Float16>(*factor);
        steps += lanes.own() * 8;
        return {numbers(codes.x, steps, of_token), numbers(codes.x >> 16, steps + 2, of_token),
                numbers(codes.y, steps + 4, of_token), numbers(codes.y >> 16, steps + 6, of_token)};
    }

  private:
    static __device__ float half_of(uint32_t pair, uint32_t shift) {
        return cuda::widened<Element>(static_cast<uint16_t>(pair >> shift));
    }
    // Round up to a float16, which has 13 bits less: by a smaller factor the largest code would be beyond 127.
    static __device__ float rounded_up(float value) { return __uint_as_float((__float_as_uint(value) + 0x1FFF) & ~0x1FFFu); }
    // Return a word of the lowest bytes.
    static __device__ uint32_t word(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
    }
    static __device__ uint32_t numbers(uint32_t bytes, const float* steps, float factor) {
        return Element::pack((float(bytes & 0xFF) - code_zero) * steps[0] * factor,
                             (float(bytes >> 8 & 0xFF) - code_zero) * steps[1] * factor);
    }
};

}  // namespace sglang_hybrid::cuda
