// The two halves of attention as kernels of their own: token weights, and sums of values by given weights.
#include <arm_neon.h>
#include <stdint.h>

#include "attention/neon_fp8.h"
#include "attention/neon_lanes.h"
#include "attention/variants.h"
#include "attention/vector_sums.h"
#include "attention/vector_weights.h"

namespace sglang_hybrid {
namespace {

// The Lanes of vector_kernel.h for NEON. Attention uses tiles of its own instead (neon.cpp); the halves compute less and wait
// for memory more.
struct NeonVectorLanes : NeonLanes {
    static constexpr uint32_t logit_heads = 4;
    static constexpr uint32_t logit_tokens = 4;
    static constexpr uint32_t output_heads = 6;
    static constexpr uint32_t output_pairs = 2;
    static constexpr uint32_t weight_tokens = 1;
    static constexpr bool halves_of_fp8 = false;  // few numbers are converted: only keys, for weights

    static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }

    static void store_sums(float* to, const Vector (&v)[logit_tokens]) {
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
    }

    template <DType dtype>
    static constexpr bool splits = dtype == DType::bf16;

    template <DType dtype>
    static void load_pair(const char* from, Vector& a, Vector& b) {
        if constexpr (dtype == DType::fp32) {
            a = vld1q_f32(reinterpret_cast<const float*>(from));
            b = vld1q_f32(reinterpret_cast<const float*>(from) + width);
        } else if constexpr (is_fp8(dtype)) {
            const int8x8_t eight = vld1_s8(reinterpret_cast<const int8_t*>(from));
            const float16x8_t halves = vreinterpretq_f16_u16(scaled_halves(eight));
            a = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(halves)), fp8_scale);
            b = vmulq_n_f32(vcvt_f32_f16(vget_high_f16(halves)), fp8_scale);
        } else {
            const uint16x8_t both = vld1q_u16(reinterpret_cast<const uint16_t*>(from));
            if constexpr (dtype == DType::bf16) {
                const uint32x4_t pairs = vreinterpretq_u32_u16(both);
                a = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
                b = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
            } else {
                const float16x8_t halves = vreinterpretq_f16_u16(both);
                a = vcvt_f32_f16(vget_low_f16(halves));
                b = vcvt_f32_f16(vget_high_f16(halves));
            }
        }
    }

    static void interleave(Vector& even, Vector& odd) {
        const Vector first = vzip1q_f32(even, odd);
        odd = vzip2q_f32(even, odd);
        even = first;
    }
};

template <>
inline float32x4_t exponential<NeonVectorLanes>(float32x4_t x) {
    return exponential<NeonLanes>(x);
}

}  // namespace

SumKernel neon_sum_kernel(DType dtype, uint32_t head_dim) { return vector_sum_kernel<NeonVectorLanes>(dtype, head_dim); }

WeightKernel neon_weight_kernel(DType dtype, uint32_t head_dim) {
    return vector_weight_kernel<NeonVectorLanes>(dtype, head_dim);
}

}  // namespace sglang_hybrid
