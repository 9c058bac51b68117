// Steps that the tiles of logits and output are made of, in the order in which they are written.
//
// A tile needs most of the 32 registers, and which operation comes when decides whether the vector units wait. From
// intrinsics GCC 12 makes loops that keep some sums in memory: it moves loads and conversions up, and gives a sum
// another register with every product. Assembler statements stay where they are, and a sum is their input and output.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t vector_width = 4;

template <DType dtype>
constexpr uint32_t vector_bytes = vector_width * bytes_of(dtype);  // in the pool

// FP8 as fp16 of 2^-8 times the value: the exponent's bias is 15 there instead of 7. Denormals are denormals.
inline uint16x8_t scaled_halves(int8x8_t eight) {
    const uint16x8_t moved = vreinterpretq_u16_s16(vshll_n_s8(eight, 7));
    const uint16x8_t halves = vandq_u16(moved, vdupq_n_u16(0xbf80));
    const uint16x8_t largest = vdupq_n_u16(0x3f80);  // in FP8 that is NaN
    return vorrq_u16(halves, vandq_u16(vceqq_u16(vandq_u16(moved, largest), largest), vdupq_n_u16(0x7e00)));
}

// Four values of the pool. To be called well before they are used: products that wait for a conversion keep those
// behind them out of the vector units' queues.
template <DType dtype>
inline float32x4_t load_four(const char* from) {
    if constexpr (dtype == DType::fp32) {
        return vld1q_f32(reinterpret_cast<const float*>(from));
    } else if constexpr (is_fp8(dtype)) {
        int32_t four;
        memcpy(&four, from, sizeof four);
        const uint16x4_t halves = vget_low_u16(scaled_halves(vreinterpret_s8_s32(vdup_n_s32(four))));
        float32x4_t values;
        __asm__ volatile("fcvtl %0.4s, %1.4h" : "=w"(values) : "w"(halves));
        return vmulq_n_f32(values, 0x1p8f);
    } else {
        const uint16x4_t four = vld1_u16(reinterpret_cast<const uint16_t*>(from));
        float32x4_t values;
        if constexpr (dtype == DType::bf16) {
            // not SHLL, which only one of two vector units has
            const uint16x8_t zero = vdupq_n_u16(0);
            __asm__ volatile("zip1 %0.8h, %1.8h, %2.8h" : "=w"(values) : "w"(zero), "w"(four));
        } else {
            __asm__ volatile("fcvtl %0.4s, %1.4h" : "=w"(values) : "w"(four));
        }
        return values;
    }
}

inline void add_product(float32x4_t& sum, float32x4_t a, float32x4_t b) {
    __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
}

// Of `a` and one value of `b`; `lane` is known to the compiler where loops are unrolled.
inline void add_product(float32x4_t& sum, float32x4_t a, float32x4_t b, uint32_t lane) {
    switch (lane) {
        case 0: __asm__ volatile("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(a), "w"(b)); break;
        case 1: __asm__ volatile("fmla %0.4s, %1.4s, %2.s[1]" : "+w"(sum) : "w"(a), "w"(b)); break;
        case 2: __asm__ volatile("fmla %0.4s, %1.4s, %2.s[2]" : "+w"(sum) : "w"(a), "w"(b)); break;
        default: __asm__ volatile("fmla %0.4s, %1.4s, %2.s[3]" : "+w"(sum) : "w"(a), "w"(b));
    }
}

}  // namespace
}  // namespace sglang_hybrid
