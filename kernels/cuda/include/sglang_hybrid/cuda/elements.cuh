// The dtypes of models: conversion from float32, and products on the tensor cores.
//
// Fragments of m16n8k16, for lane = 4 * i + j:   A (16 x 16)  rows i, i + 8    columns 2j, 2j + 1, 2j + 8, 2j + 9
//                                                B (16 x 8)   column i         rows 2j, 2j + 1, 2j + 8, 2j + 9
//                                                C (16 x 8)   rows i, i + 8    columns 2j, 2j + 1
#pragma once

#include <cstdint>

namespace sglang_hybrid::cuda {

struct BFloat16 {
    // Round two numbers to a pair, with `low` in the lower half.
    static __device__ uint32_t pack(float low, float high) {
        uint32_t packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ void multiply_add(float (&to)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
    static __device__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_add(c, a, b0, b1, c);
    }
};

struct Float16 {
    static __device__ uint32_t pack(float low, float high) {
        uint32_t packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ void multiply_add(float (&to)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
    static __device__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_add(c, a, b0, b1, c);
    }
};

}  // namespace sglang_hybrid::cuda
