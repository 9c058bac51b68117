// Conversions of 16-bit values, the hardware's approximations of exp2 and log2, and replacement of NaN and infinities.
#pragma once

#include <cfloat>
#include <cstdint>

#include "sglang_hybrid/cuda/elements.cuh"

namespace sglang_hybrid::cuda {

template <class Element>
__device__ float widened(uint16_t bits);

template <>
__device__ inline float widened<BFloat16>(uint16_t bits) {
    return __uint_as_float(uint32_t{bits} << 16);
}

template <>
__device__ inline float widened<Float16>(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline uint16_t to_half(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Return the products of two pairs of float16.
__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Return the differences of two pairs of float16.
__device__ inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
    uint32_t difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

// Return the lower of two bfloat16 for each half of a pair; of NaN and a number, the number.
__device__ inline uint32_t lower_bfloat16(uint32_t a, uint32_t b) {
    uint32_t lower;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(lower) : "r"(a), "r"(b));
    return lower;
}

// Return bytes `kFirst` and `kFirst` + 1 of a word, each plus 1024, as two float16: a byte is the last bits of such a number.
template <uint32_t kFirst>
__device__ inline uint32_t halves_of_bytes(uint32_t word) {
    uint32_t both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(word), "r"(0x64646464), "n"(0x4140 + kFirst * 0x0101));
    return both;
}

// Return an arbitrary value, for operands that do not matter. This takes no instruction.
__device__ inline uint32_t any_value() {
    uint32_t value;
    asm volatile("" : "=r"(value));
    return value;
}

// Return (bits & mask) | with, by one instruction, which the compiler does not choose if `mask` and `with` are constants.
__device__ inline uint32_t masked_with(uint32_t bits, uint32_t mask, uint32_t with) {
    uint32_t value;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(value) : "r"(bits), "r"(mask), "r"(with));
    return value;
}

__device__ inline float fast_exp2(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ inline float fast_log2(float x) {
    float value;
    asm("lg2.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// Return a finite number as it is, and the lowest number for NaN and infinities.
__device__ inline float or_lowest(float value) { return fabsf(value) <= FLT_MAX ? value : -FLT_MAX; }

}  // namespace sglang_hybrid::cuda
