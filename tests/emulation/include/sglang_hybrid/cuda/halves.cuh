// In place of halves.cuh.
#pragma once

#include "sglang_hybrid/cuda/elements.cuh"

namespace sglang_hybrid::cuda {

template <class Element>
float widened(uint16_t bits);
template <>
inline float widened<BFloat16>(uint16_t bits) {
    return BFloat16Values::widen(bits);
}
template <>
inline float widened<Float16>(uint16_t bits) {
    return Float16Values::widen(bits);
}

inline uint16_t to_half(float value) { return static_cast<uint16_t>(Float16Values::narrow(value)); }
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
    const auto product = [](uint32_t x, uint32_t y) { return Float16Values::widen(x) * Float16Values::widen(y); };
    return Float16::pack(product(a & 0xFFFF, b & 0xFFFF), product(a >> 16, b >> 16));
}
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
    const auto difference = [](uint32_t x, uint32_t y) { return Float16Values::widen(x) - Float16Values::widen(y); };
    return Float16::pack(difference(a & 0xFFFF, b & 0xFFFF), difference(a >> 16, b >> 16));
}
inline uint32_t lower_bfloat16(uint32_t a, uint32_t b) {
    const auto value = [](uint32_t bits) { return BFloat16Values::widen(bits & 0xFFFF); };
    return BFloat16::pack(std::fmin(value(a), value(b)), std::fmin(value(a >> 16), value(b >> 16)));
}
template <uint32_t kFirst>
inline uint32_t halves_of_bytes(uint32_t word) {
    const auto value = [&](uint32_t byte) { return float(word >> 8 * byte & 0xFF) + 1024; };
    return Float16::pack(value(kFirst), value(kFirst + 1));
}
inline uint32_t any_value() { return 0x7FFF7FFF; }  // NaN
inline uint32_t masked_with(uint32_t bits, uint32_t mask, uint32_t with) { return (bits & mask) | with; }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float or_lowest(float value) { return std::fabs(value) <= FLT_MAX ? value : -FLT_MAX; }

}  // namespace sglang_hybrid::cuda
