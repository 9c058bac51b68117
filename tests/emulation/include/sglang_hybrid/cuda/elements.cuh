// In place of elements.cuh: the products of tensor cores, lane by lane.
#pragma once

#include "cuda_on_cpu.h"

namespace sglang_hybrid::cuda {

struct BFloat16Values {
    static float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
    static uint32_t narrow(float value) {
        const uint32_t bits = __float_as_uint(value);
        return value != value ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    }
};

// GCC has _Float16 for C++ on aarch64 from version 13 on only
#ifdef __aarch64__
using Half = __fp16;
#else
using Half = _Float16;
#endif

struct Float16Values {
    static float widen(uint32_t bits) {
        const auto low = static_cast<uint16_t>(bits);
        Half value;
        std::memcpy(&value, &low, sizeof value);
        return static_cast<float>(value);
    }
    static uint32_t narrow(float value) {
        const auto half = static_cast<Half>(value);
        uint16_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        return bits;
    }
};

template <class Values>
struct Emulated {
    static uint32_t pack(float low, float high) { return Values::narrow(low) | Values::narrow(high) << 16; }

    static void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply_add(c, a, b0, b1, c); }
    static void multiply_add(float (&to)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
        const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
        const char* const all = emulated::show(mine, sizeof mine);
        struct Registers {
            uint32_t of[6];
        };
        const auto value = [&](uint32_t lane, uint32_t which, uint32_t k) {
            return Values::widen(emulated::of_lane<Registers>(all, lane).of[which] >> k % 2 * 16 & 0xFFFF);
        };
        const uint32_t i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
        for (uint32_t n = 0; n < 4; ++n) {
            const uint32_t column = 2 * j + n % 2;
            to[n] = c[n];
            for (uint32_t k = 0; k < 16; ++k) {
                const uint32_t lane = k % 8 / 2;
                to[n] += value(4 * i + lane, n / 2 + k / 8 * 2, k) * value(4 * column + lane, 4 + k / 8, k);
            }
        }
    }
};

struct BFloat16 : Emulated<BFloat16Values> {};
struct Float16 : Emulated<Float16Values> {};

}  // namespace sglang_hybrid::cuda
