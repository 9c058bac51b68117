// The Lanes that online_softmax.h needs for NEON (any aarch64), with an exponential of their own.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "attention/exponential.h"

namespace sglang_hybrid {
namespace {

struct NeonLanes {
    using Vector = float32x4_t;
    static constexpr uint32_t width = 4;

    static Vector zero() { return vdupq_n_f32(0.0f); }
    static Vector broadcast(float value) { return vdupq_n_f32(value); }
    static Vector load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Vector v) { vst1q_f32(to, v); }
    static Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
    static Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
    static Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
    static Vector max(Vector a, Vector b) { return vmaxq_f32(a, b); }
    static float highest(Vector v) { return vmaxvq_f32(v); }
    static float sum(Vector v) { return vaddvq_f32(v); }
};

// exp with fewer steps than the general version, since weights are a tenth of a block's work: FRINTN and FCVTZS keep a unit of
// a Neoverse N1 busy for two cycles, and with FMA one constant for ln 2 is enough. Relative error 4e-7.
template <>
inline float32x4_t exponential<NeonLanes>(float32x4_t x) {
    const auto constant = [](float value) { return vdupq_n_f32(value); };

    // this number has no fraction bits left: adding it rounds, and leaves the integer in the lowest bits
    const float32x4_t big = constant(0x1.8p23f);
    const float32x4_t rounded = vfmaq_f32(big, x, constant(1.44269504f));
    const float32x4_t rest = vfmsq_f32(x, vsubq_f32(rounded, big), constant(0.693147181f));

    // minimax polynomial for the relative error over +-ln(2)/2, with the first two coefficients held at 1
    float32x4_t value = constant(0.008312525227665901f);
    value = vfmaq_f32(constant(0.041890114545822144f), value, rest);
    value = vfmaq_f32(constant(0.16667114198207855f), value, rest);
    value = vfmaq_f32(constant(0.499992311000824f), value, rest);
    value = vfmaq_f32(constant(1.0f), value, rest);
    value = vfmaq_f32(constant(1.0f), value, rest);
    const uint32x4_t power = vshlq_n_u32(vreinterpretq_u32_f32(rounded), 23);
    const uint32x4_t scaled = vaddq_u32(vreinterpretq_u32_f32(value), power);
    return vreinterpretq_f32_u32(vandq_u32(scaled, vcgeq_f32(x, constant(-87.0f))));
}

}  // namespace
}  // namespace sglang_hybrid
