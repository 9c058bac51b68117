// FP8 is converted to fp16 by moving bits only, which gives 2^-8 times the number. This is exact, and denormals stay
// denormals.
#pragma once

namespace sglang_hybrid {
namespace {

constexpr float fp8_scale = 0x1p8f;  // factor from such fp16 numbers to the FP8 values

}  // namespace
}  // namespace sglang_hybrid
