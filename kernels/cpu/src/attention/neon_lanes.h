// NEON (any aarch64) as Lanes of vector_kernel.h.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {
namespace {

struct NeonLanes {
    using Vector = float32x4_t;
    static constexpr uint32_t width = 4;
    // 16 sums in flight hide the latency of FMLA on cores with four vector units
    static constexpr uint32_t logit_heads = 4;
    static constexpr uint32_t logit_tokens = 4;
    static constexpr uint32_t output_heads = 5;
    static constexpr uint32_t output_pairs = 2;

    static Vector zero() { return vdupq_n_f32(0.0f); }
    static Vector broadcast(float value) { return vdupq_n_f32(value); }
    static Vector load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Vector v) { vst1q_f32(to, v); }
    static Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
    static Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
    static Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
    static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
    static Vector max(Vector a, Vector b) { return vmaxq_f32(a, b); }
    static Vector round(Vector x) { return vrndnq_f32(x); }

    static Vector scaled_where_at_least(Vector value, Vector power, Vector x, float threshold) {
        const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(power), 23);
        const uint32x4_t scaled = vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(value), exponent));
        return vreinterpretq_f32_u32(vandq_u32(scaled, vcgeq_f32(x, vdupq_n_f32(threshold))));
    }

    static float highest(Vector v) { return vmaxvq_f32(v); }
    static float sum(Vector v) { return vaddvq_f32(v); }

    static void store_sums(float* to, const Vector (&v)[logit_tokens]) {
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
    }

    template <DType dtype>
    static constexpr bool splits = dtype == DType::bf16;

    template <DType dtype>
    static void load_pair(const char* from, Vector& a, Vector& b) {
        if constexpr (dtype == DType::bf16) {
            const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from)));
            a = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
            b = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
        } else if constexpr (dtype == DType::fp16) {
            const float16x8_t both = vreinterpretq_f16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from)));
            a = vcvt_f32_f16(vget_low_f16(both));
            b = vcvt_high_f32_f16(both);
        } else {
            a = vld1q_f32(reinterpret_cast<const float*>(from));
            b = vld1q_f32(reinterpret_cast<const float*>(from + 16));
        }
    }

    static void interleave(Vector& even, Vector& odd) {
        const Vector first = vzip1q_f32(even, odd);
        odd = vzip2q_f32(even, odd);
        even = first;
    }

    static constexpr uint32_t weight_tokens = width;
    template <uint32_t lane>
    static Vector fma_lane(Vector a, Vector b, Vector c) {
        return vfmaq_laneq_f32(c, a, b, lane);
    }
};

}  // namespace
}  // namespace sglang_hybrid
