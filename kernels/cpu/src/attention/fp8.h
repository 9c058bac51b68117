// FP8 as fp16 only has its bits moved, which makes it 2^-8 times the number: exact, and denormals are denormals.
#pragma once

namespace sglang_hybrid {
namespace {

constexpr float fp8_scale = 0x1p8f;  // what such halves have to be multiplied with

}  // namespace
}  // namespace sglang_hybrid
