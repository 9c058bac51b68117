// The Lanes of vector_kernel.h for AVX-512 (F, BW, DQ, VL).
//
// bf16 is computed in fp32 here too. On Sapphire Rapids VDPBF16PS takes two cycles where FMA takes half a cycle, so VDPBF16PS
// has half the throughput of fp32 for the same sums, and it would round the weights.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "attention/fp8.h"
#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

struct Avx512Lanes {
    using Vector = __m512;
    static constexpr uint32_t width = 16;
    static constexpr uint32_t logit_heads = 3;
    static constexpr uint32_t logit_tokens = 8;
    static constexpr uint32_t output_heads = 6;
    static constexpr uint32_t output_pairs = 2;

    static Vector zero() { return _mm512_setzero_ps(); }
    static Vector broadcast(float value) { return _mm512_set1_ps(value); }
    static Vector load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Vector v) { _mm512_storeu_ps(to, v); }
    static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
    static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
    static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
    static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
    static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
    static Vector round(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static Vector scaled_where_at_least(Vector value, Vector power, Vector x, float threshold) {
        const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_GE_OQ);
        return _mm512_maskz_scalef_ps(kept, value, power);
    }

    static float highest(Vector v) { return _mm512_reduce_max_ps(v); }
    static float sum(Vector v) { return _mm512_reduce_add_ps(v); }

    static void store_sums(float* to, const Vector (&v)[logit_tokens]) {
        // each step halves the number of vectors and the number of partial sums of each input vector
        const Vector low = sum_in_lanes(v), high = sum_in_lanes(v + 4);
        const Vector two = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
        const Vector one = add(_mm512_shuffle_f32x4(two, two, 0x08), _mm512_shuffle_f32x4(two, two, 0x0d));
        _mm256_storeu_ps(to, _mm512_castps512_ps256(one));
    }

    template <DType dtype>
    static constexpr bool splits = dtype == DType::bf16;

    template <DType dtype>
    static void load_pair(const char* from, Vector& a, Vector& b) {
        if constexpr (dtype == DType::bf16) {
            const __m512i both = _mm512_loadu_si512(from);
            a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            b = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        } else if constexpr (dtype == DType::fp16) {
            a = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
            b = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32)));
        } else if constexpr (is_fp8(dtype)) {
            const __m512i halves = with_nan(finite_halves(load_fp8(from)));
            const Vector scale = broadcast(fp8_scale);
            a = mul(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), scale);
            b = mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), scale);
        } else {
            a = _mm512_loadu_ps(from);
            b = _mm512_loadu_ps(from + 64);
        }
    }

    static void interleave(Vector& even, Vector& odd) {
        const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        const Vector first = _mm512_permutex2var_ps(even, low, odd);
        odd = _mm512_permutex2var_ps(even, high, odd);
        even = first;
    }

    static constexpr uint32_t weight_tokens = 1;

    static constexpr bool halves_of_fp8 = true;

    static void to_scaled_halves(const char* from, uint32_t count, uint16_t* to) {
        __m512i largest = _mm512_setzero_si512();
        for (uint32_t i = 0; i < count; i += 64) {
            const __m512i numbers = _mm512_loadu_si512(from + i);
            largest = _mm512_max_epu8(largest, _mm512_or_si512(numbers, _mm512_set1_epi8(-128)));
            _mm512_store_si512(to + i, finite_halves(load_fp8(from + i)));
            _mm512_store_si512(to + i + 32, finite_halves(load_fp8(from + i + 32)));
        }
        if (_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(-1)) != 0) {
            put_nan(to, count);
        }
    }

  private:
    static __m256i load_fp8(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

    // Convert FP8 to fp16 of 2^-8 times the value: bits only move, since the exponent's bias is 15 in fp16 and 7 in FP8.
    // Denormals stay denormals. NaN becomes 480 (times 2^-8); with_nan turns it back into NaN.
    static __m512i finite_halves(__m256i fp8) {
        const __m512i moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(fp8), 7);
        return _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<short>(0xbf80)));
    }

    static __m512i with_nan(__m512i halves) {
        const __m512i magnitude = _mm512_and_si512(halves, _mm512_set1_epi16(0x3f80));
        const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3f80));
        return _mm512_mask_mov_epi16(halves, is_nan, _mm512_set1_epi16(0x7e00));
    }

    __attribute__((noinline)) static void put_nan(uint16_t* halves, uint32_t count) {
        for (uint32_t i = 0; i < count; i += 32) {
            _mm512_store_si512(halves + i, with_nan(_mm512_load_si512(halves + i)));
        }
    }

    // Each 128-bit lane of the result holds four partial sums, one of each input vector.
    static Vector sum_in_lanes(const Vector* v) {
        const __m512d a = _mm512_castps_pd(add(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])));
        const __m512d b = _mm512_castps_pd(add(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3])));
        return add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
};

}  // namespace
}  // namespace sglang_hybrid
