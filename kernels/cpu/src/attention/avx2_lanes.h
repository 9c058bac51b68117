// The Lanes of vector_kernel.h for AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "attention/fp8.h"
#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

struct Avx2Lanes {
    using Vector = __m256;
    static constexpr uint32_t width = 8;
    static constexpr uint32_t logit_heads = 3;
    static constexpr uint32_t logit_tokens = 4;
    static constexpr uint32_t output_heads = 6;
    static constexpr uint32_t output_pairs = 1;

    static Vector zero() { return _mm256_setzero_ps(); }
    static Vector broadcast(float value) { return _mm256_set1_ps(value); }
    static Vector load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Vector v) { _mm256_storeu_ps(to, v); }
    static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
    static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
    static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
    static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
    static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
    static Vector round(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static Vector scaled_where_at_least(Vector value, Vector power, Vector x, float threshold) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
        const Vector scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), exponent));
        return _mm256_and_ps(scaled, _mm256_cmp_ps(x, _mm256_set1_ps(threshold), _CMP_GE_OQ));
    }

    static float highest(Vector v) {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    }

    static float sum(Vector v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }

    static void store_sums(float* to, const Vector (&v)[logit_tokens]) {
        const Vector halves = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
    }

    template <DType dtype>
    static constexpr bool splits = dtype == DType::bf16;

    template <DType dtype>
    static void load_pair(const char* from, Vector& a, Vector& b) {
        if constexpr (dtype == DType::bf16) {
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            a = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            b = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
        } else if constexpr (dtype == DType::fp16) {
            a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16)));
        } else if constexpr (is_fp8(dtype)) {
            const __m256i halves = with_nan(finite_halves(load_fp8(from)));
            const Vector scale = broadcast(fp8_scale);
            a = mul(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale);
            b = mul(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale);
        } else {
            a = _mm256_loadu_ps(reinterpret_cast<const float*>(from));
            b = _mm256_loadu_ps(reinterpret_cast<const float*>(from + 32));
        }
    }

    static void interleave(Vector& even, Vector& odd) {
        const Vector low = _mm256_unpacklo_ps(even, odd);
        const Vector high = _mm256_unpackhi_ps(even, odd);
        even = _mm256_permute2f128_ps(low, high, 0x20);
        odd = _mm256_permute2f128_ps(low, high, 0x31);
    }

    static constexpr uint32_t weight_tokens = 1;

    static constexpr bool halves_of_fp8 = true;

    static void to_scaled_halves(const char* from, uint32_t count, uint16_t* to) {
        __m256i largest = _mm256_setzero_si256();
        for (uint32_t i = 0; i < count; i += 32) {
            const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
            largest = _mm256_max_epu8(largest, _mm256_or_si256(numbers, _mm256_set1_epi8(-128)));
            store_halves(to + i, finite_halves(load_fp8(from + i)));
            store_halves(to + i + 16, finite_halves(load_fp8(from + i + 16)));
        }
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1))) != 0) {
            put_nan(to, count);
        }
    }

  private:
    static __m128i load_fp8(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

    static void store_halves(uint16_t* to, __m256i halves) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), halves); }

    // Convert FP8 to fp16 of 2^-8 times the value: bits only move, since the exponent's bias is 15 in fp16 and 7 in FP8.
    // Denormals stay denormals. NaN becomes 480 (times 2^-8); with_nan turns it back into NaN.
    static __m256i finite_halves(__m128i fp8) {
        const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(fp8), 7);
        return _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<short>(0xbf80)));
    }

    static __m256i with_nan(__m256i halves) {
        const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x3f80));
        const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
        return _mm256_or_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
    }

    __attribute__((noinline)) static void put_nan(uint16_t* halves, uint32_t count) {
        for (uint32_t i = 0; i < count; i += 16) {
            store_halves(halves + i, with_nan(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves + i))));
        }
    }
};

}  // namespace
}  // namespace sglang_hybrid
