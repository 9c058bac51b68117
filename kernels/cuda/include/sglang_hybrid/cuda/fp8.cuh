// FP8 of a quantised pool: e4m3, which has no infinities. Kernels store numbers as `to_stored` of the reference does, and
// read them as float16, in which all of them are exact. A query of bfloat16 becomes float16, too, once a power of two has
// brought its largest number into float16's range (scaled_queries.cuh). So products over FP8 are float16 products, whatever the
// model's dtype is.
#pragma once

#include <type_traits>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/elements.cuh"
#include "sglang_hybrid/cuda/halves.cuh"

namespace sglang_hybrid::cuda {

// Element type of kernels over a pool of FP8, whatever the dtype of the queries.
struct Fp8 {
    // Factor that numbers from `widen` still have to be multiplied by. Kernels multiply the products by it instead, once.
#if __CUDA_ARCH__ >= 890
    static constexpr float unit = 1.0f;
#else
    static constexpr float unit = 256.0f;
#endif

    // Convert the four numbers of a word to two pairs of float16: bytes 0 and 1, and bytes 2 and 3.
    static __device__ void widen(uint32_t (&pairs)[2], uint32_t word) {
#if __CUDA_ARCH__ >= 890
        pairs[0] = widen_pair(word), pairs[1] = widen_pair(word >> 16);
#else
        const Placed placed(word);
        pairs[0] = placed.pair<0x5140>(), pairs[1] = placed.pair<0x7362>();
#endif
    }

    // As `widen`, with the pairs bytes 0 and 2, and bytes 1 and 3.
    static __device__ void widen_across(uint32_t (&pairs)[2], uint32_t word) {
#if __CUDA_ARCH__ >= 890
        widen(pairs, __byte_perm(word, 0, 0x3120));
#else
        const Placed placed(word);
        pairs[0] = placed.pair<0x6240>(), pairs[1] = placed.pair<0x7351>();
#endif
    }

  private:
#if __CUDA_ARCH__ >= 890
    static __device__ uint32_t widen_pair(uint32_t bytes) {
        uint32_t pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
        return pair;
    }
#endif

    // Exponent and mantissa of FP8 moved to the bits where float16 has them: the result is 2^8 times smaller than the number,
    // also for denormals. NaN, which is the largest mantissa at the largest exponent, gets the one more bit that makes it NaN
    // of float16.
    struct Placed {
        uint32_t upper, lower;  // bytes of the four float16 numbers

        __device__ explicit Placed(uint32_t word) {
            const uint32_t next = (word & 0x7F7F7F7F) + 0x01010101;  // the highest bit of a byte is set if the byte is NaN
            const uint32_t magnitudes = (word & 0x7F7F7F7F) | (next & 0x80808080);
            upper = (word & 0x80808080) | (magnitudes >> 1 & 0x7F7F7F7F);
            lower = word << 7 & 0x80808080;
        }
        template <uint32_t kBytes>
        __device__ uint32_t pair() const {
            return __byte_perm(lower, upper, kBytes);
        }
    };
};

// Bytes of one number in a pool of `Element`.
template <class Element>
inline constexpr uint32_t value_bytes = 2;
template <>
inline constexpr uint32_t value_bytes<Fp8> = 1;

// Return the dtype of queries and results over a pool of `Element`. `dtype` is that of pool and queries.
template <class Element>
__device__ DType model_dtype(DType dtype) {
    if constexpr (std::is_same_v<Element, Fp8>) return dtype == DType::fp8_bf16 ? DType::bf16 : DType::fp16;
    else return dtype;
}

// -- eight numbers -----------------------------------------------------------------------------------------------------

// Convert two numbers to FP8, the first in the low byte. A number is rounded to the nearest, of two equally near ones to the
// even one; numbers beyond 448 become 448. NaN stays NaN.
__device__ inline uint32_t to_fp8(float first, float second) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
#else
    const auto one = [](float value) -> uint32_t {
        const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
        if (value != value) return sign | 0x7F;
        const float size = fminf(fabsf(value), 448.0f);
        // the sum with 2^14 is rounded to a multiple of 2^-9, the distance of denormals
        if (size < 0.015625f) return sign | (__float_as_uint(size + 16384.0f) - 0x46800000);
        const uint32_t bits = __float_as_uint(size) - (120u << 23);  // exponents begin at -7 instead of -127
        return sign | (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20;
    };
    return one(first) | one(second) << 8;
#endif
}

__device__ inline float of_fp8(uint32_t byte) {
    const uint32_t size = byte & 0x7F;
    if (size == 0x7F) return __uint_as_float(0x7FC00000);
    return __uint_as_float((byte & 0x80) << 24 | size << 20) * 0x1p120f;
}

// Conversions of eight numbers between the model's dtype, a uint4 of 16-bit values, and the dtype of the pool.
template <class Element, class Stored>
struct Eight {
    using Bits = uint4;
    static __device__ Bits stored(uint4 numbers) { return numbers; }
    static __device__ uint4 widened(Bits bits) { return bits; }
};

template <class Element>
struct Eight<Element, Fp8> {
    using Bits = uint2;

    static __device__ Bits stored(uint4 numbers) {
        return {half(numbers.x) | half(numbers.y) << 16, half(numbers.z) | half(numbers.w) << 16};
    }
    static __device__ uint4 widened(Bits bits) { return {pair(bits.x), pair(bits.x >> 16), pair(bits.y), pair(bits.y >> 16)}; }

  private:
    static __device__ uint32_t half(uint32_t pair) {
        return to_fp8(cuda::widened<Element>(static_cast<uint16_t>(pair)),
                      cuda::widened<Element>(static_cast<uint16_t>(pair >> 16)));
    }
    static __device__ uint32_t pair(uint32_t bytes) { return Element::pack(of_fp8(bytes & 0xFF), of_fp8(bytes >> 8 & 0xFF)); }
};

}  // namespace sglang_hybrid::cuda
