// Conversion of FP8 to fp16 of 2^-8 times the value. Bits only move, since the exponent's bias is 15 in fp16 and 7 in FP8.
// This is exact, and denormals stay denormals.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "attention/fp8.h"

namespace sglang_hybrid {
namespace {

inline uint16x8_t with_nan(uint16x8_t halves) {
    const uint16x8_t largest = vdupq_n_u16(0x3f80);  // the moved bits of NaN in FP8
    return vorrq_u16(halves, vandq_u16(vceqq_u16(vandq_u16(halves, largest), largest), vdupq_n_u16(0x7e00)));
}

// Convert eight numbers; NaN becomes 480 (times 2^-8).
inline uint16x8_t finite_halves(int8x8_t eight) {
    return vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(eight, 7)), vdupq_n_u16(0xbf80));
}

inline uint16x8_t scaled_halves(int8x8_t eight) { return with_nan(finite_halves(eight)); }

__attribute__((noinline)) inline void put_nan(uint16_t* halves, uint32_t count) {
    for (uint32_t i = 0; i < count; i += 8) {
        vst1q_u16(halves + i, with_nan(vld1q_u16(halves + i)));
    }
}

// Convert `count` numbers, a multiple of 16. NaN is detected on the way and written in a second pass, since there is hardly
// ever one.
inline void to_scaled_halves(const char* from, uint32_t count, uint16_t* to) {
    uint8x16_t any_nan = vdupq_n_u8(0);
    for (uint32_t i = 0; i < count; i += 16) {
        const int8x16_t numbers = vld1q_s8(reinterpret_cast<const int8_t*>(from) + i);
        const uint8x16_t nan = vdupq_n_u8(0x7f);
        any_nan = vorrq_u8(any_nan, vceqq_u8(vandq_u8(vreinterpretq_u8_s8(numbers), nan), nan));
        vst1q_u16(to + i, finite_halves(vget_low_s8(numbers)));
        vst1q_u16(to + i + 8, finite_halves(vget_high_s8(numbers)));
    }
    if (vmaxvq_u8(any_nan) != 0) {
        put_nan(to, count);
    }
}

}  // namespace
}  // namespace sglang_hybrid
