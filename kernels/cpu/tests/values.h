// Conversions between floats and the numbers of each dtype, for checks that compute in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline double from_fp16(uint16_t half) {
    const int exponent = half >> 10 & 31;
    const double mantissa = half & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

// Convert to fp16, rounding towards zero and clamping to the largest finite number. The exact rounding does not matter for
// inputs of a check.
inline uint16_t to_fp16(float value) {
    const uint16_t sign = value < 0 ? 0x8000 : 0;
    const double magnitude = std::min(std::fabs(static_cast<double>(value)), 65504.0);
    int exponent;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, -14);
    const auto steps = static_cast<uint32_t>(std::ldexp(magnitude, 10 - exponent));
    if (steps < 1024) {
        return static_cast<uint16_t>(sign | steps);
    }
    return static_cast<uint16_t>(sign | (exponent + 15) << 10 | (steps - 1024));
}

inline double from_fp8(uint8_t byte) {
    const int exponent = byte >> 3 & 15;
    const double mantissa = byte & 7;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    const double number = (byte & 0x7f) == 0x7f ? std::nan("") : magnitude;
    return byte & 0x80 ? -number : number;
}

// Convert to FP8, rounding towards zero and clamping to the largest finite number.
inline uint8_t to_fp8(float value) {
    const uint8_t sign = value < 0 ? 0x80 : 0;
    const double magnitude = std::min(std::fabs(static_cast<double>(value)), 448.0);
    int exponent;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, -6);
    const auto steps = static_cast<uint32_t>(std::ldexp(magnitude, 3 - exponent));
    return static_cast<uint8_t>(sign | (steps < 8 ? steps : uint32_t(exponent + 7) << 3 | (steps - 8)));
}

// Write a number of the pool's dtype. For numbers of queries, pass query_dtype(dtype).
inline void put(DType dtype, char* to, float value) {
    if (is_fp8(dtype)) {
        *to = static_cast<char>(to_fp8(value));
        return;
    }
    const uint16_t half = dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
    std::memcpy(to, dtype == DType::fp32 ? static_cast<const void*>(&value) : &half, bytes_of(dtype));
}

// Read a number of the pool's dtype. For numbers of queries, pass query_dtype(dtype).
inline double get(DType dtype, const char* from) {
    if (is_fp8(dtype)) {
        return from_fp8(static_cast<uint8_t>(*from));
    }
    uint16_t half;
    float value;
    std::memcpy(&half, from, 2);
    if (dtype == DType::fp16) {
        return from_fp16(half);
    }
    if (dtype == DType::bf16) {
        return float_of(uint32_t{half} << 16);
    }
    std::memcpy(&value, from, 4);
    return value;
}

}  // namespace sglang_hybrid
