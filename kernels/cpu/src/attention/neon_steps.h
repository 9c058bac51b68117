// The steps of the tiles of logits and output, as assembler statements that keep the order in which they are written.
//
// A tile needs most of the 32 registers, and the order of operations decides whether the vector units wait. From intrinsics,
// GCC 12 makes loops that keep some sums in memory: it moves loads and conversions up, and assigns a sum another register at
// every product. Assembler statements stay in order, and a sum is both their input and their output.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t vector_width = 4;

template <DType dtype>
constexpr uint32_t vector_bytes = vector_width * bytes_of(dtype);  // bytes of four numbers in the pool

// Load four numbers of the pool as fp32. Call it well before the numbers are used: products that wait for a conversion keep
// later products out of the vector units' queues.
template <DType dtype>
inline float32x4_t load_four(const char* from) {
    if constexpr (dtype == DType::fp32) {
        return vld1q_f32(reinterpret_cast<const float*>(from));
    } else {
        const uint16x4_t four = vld1_u16(reinterpret_cast<const uint16_t*>(from));
        float32x4_t values;
        if constexpr (dtype == DType::bf16) {
            // not SHLL, which only one of the two vector units executes
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

// Add the product of `a` and lane `lane` of `b`. The compiler knows `lane` where loops are unrolled.
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
