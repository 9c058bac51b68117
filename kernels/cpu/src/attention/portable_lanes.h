// The Lanes of vector_kernel.h in the compiler's own vectors of four: SSE2 on any x86-64, NEON on any aarch64, scalars
// elsewhere. Little-endian only.
#pragma once

#include <stdint.h>
#include <string.h>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

struct PortableLanes {
    typedef float Vector __attribute__((vector_size(16)));
    typedef int32_t Integers __attribute__((vector_size(16)));
    typedef uint32_t Bits __attribute__((vector_size(16)));
    typedef uint8_t Bytes __attribute__((vector_size(4)));
    static constexpr uint32_t width = 4;
    static constexpr uint32_t logit_heads = 2;
    static constexpr uint32_t logit_tokens = 4;
    static constexpr uint32_t output_heads = 5;
    static constexpr uint32_t output_pairs = 1;

    static Vector zero() { return Vector{}; }
    static Vector broadcast(float value) { return Vector{value, value, value, value}; }
    static Vector load(const float* from) { return copied<Vector>(from); }
    static void store(float* to, Vector v) { memcpy(to, &v, sizeof v); }
    static Vector add(Vector a, Vector b) { return a + b; }
    static Vector sub(Vector a, Vector b) { return a - b; }
    static Vector mul(Vector a, Vector b) { return a * b; }
    static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
    static Vector max(Vector a, Vector b) { return a > b ? a : b; }

    static Vector round(Vector x) {
        const Vector big = broadcast(0x1.8p23f);  // adding it rounds: it has no fraction bits left. For |x| < 2^22
        return (x + big) - big;
    }

    static Vector scaled_where_at_least(Vector value, Vector power, Vector x, float threshold) {
        const Integers kept = x >= broadcast(threshold);
        // where the value is not kept, the power may be too large for an integer
        const Vector used = reinterpret_cast<Vector>(reinterpret_cast<Integers>(power) & kept);
        const Integers exponent = __builtin_convertvector(used, Integers) * (1 << 23);
        return reinterpret_cast<Vector>((reinterpret_cast<Integers>(value) + exponent) & kept);
    }

    static float highest(Vector v) {
        const float a = v[0] > v[1] ? v[0] : v[1];
        const float b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }

    static float sum(Vector v) { return (v[0] + v[2]) + (v[1] + v[3]); }

    static void store_sums(float* to, const Vector (&v)[logit_tokens]) {
        const Vector low =
            __builtin_shuffle(v[0], v[1], Integers{0, 4, 1, 5}) + __builtin_shuffle(v[0], v[1], Integers{2, 6, 3, 7});
        const Vector high =
            __builtin_shuffle(v[2], v[3], Integers{0, 4, 1, 5}) + __builtin_shuffle(v[2], v[3], Integers{2, 6, 3, 7});
        store(to, __builtin_shuffle(low, high, Integers{0, 1, 4, 5}) + __builtin_shuffle(low, high, Integers{2, 3, 6, 7}));
    }

    template <DType dtype>
    static constexpr bool splits = dtype == DType::bf16 || dtype == DType::fp16;

    template <DType dtype>
    static void load_pair(const char* from, Vector& a, Vector& b) {
        if constexpr (dtype == DType::fp32) {
            a = copied<Vector>(from);
            b = copied<Vector>(from + 16);
        } else if constexpr (is_fp8(dtype)) {
            a = from_fp8(__builtin_convertvector(copied<Bytes>(from), Bits));
            b = from_fp8(__builtin_convertvector(copied<Bytes>(from + width), Bits));
        } else {
            const Bits both = copied<Bits>(from);
            if constexpr (dtype == DType::bf16) {
                a = reinterpret_cast<Vector>(both << 16);
                b = reinterpret_cast<Vector>(both & 0xffff0000u);
            } else {
                a = from_fp16(both & 0xffffu);
                b = from_fp16(both >> 16);
            }
        }
    }

    static void interleave(Vector& even, Vector& odd) {
        const Vector first = __builtin_shuffle(even, odd, Integers{0, 4, 1, 5});
        odd = __builtin_shuffle(even, odd, Integers{2, 6, 3, 7});
        even = first;
    }

    static constexpr uint32_t weight_tokens = 1;

    static constexpr bool halves_of_fp8 = false;

  private:
    template <class To>
    static To copied(const void* from) {
        To to;
        memcpy(&to, from, sizeof to);
        return to;
    }

    // Denormals have no exponent to move: their magnitudes are the integers 0 to 7 in steps of 2^-9.
    static Vector from_fp8(Bits eighth) {
        const Bits magnitude = eighth & 0x7fu;
        const Bits normal = (magnitude << 20) + (120u << 23);
        const Vector steps = __builtin_convertvector(reinterpret_cast<Integers>(magnitude), Vector) * broadcast(0x1p-9f);
        const Bits finite = magnitude < 8u ? reinterpret_cast<Bits>(steps) : normal;
        const Bits nan = reinterpret_cast<Bits>(magnitude == 0x7fu) & 0x7fc00000u;
        return reinterpret_cast<Vector>(finite | nan | (eighth & 0x80u) << 24);
    }

    static Vector from_fp16(Bits half) {
        const Bits magnitude = half & 0x7fffu;
        // the product moves the exponent's bias from 15 to 127, for denormals too
        const Vector finite = reinterpret_cast<Vector>(magnitude << 13) * broadcast(0x1p112f);
        const Bits infinite = reinterpret_cast<Bits>(magnitude >= 0x7c00u) & 0x7f800000u;
        return reinterpret_cast<Vector>(reinterpret_cast<Bits>(finite) | infinite | (half & 0x8000u) << 16);
    }
};

}  // namespace
}  // namespace sglang_hybrid
