// Selection of the kernel that is compiled for a shape of digests.
#pragma once

#include <type_traits>

#include "launching.h"
#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/compact.cuh"
#include "sglang_hybrid/cuda/elements.cuh"
#include "sglang_hybrid/cuda/selection_api.h"

template <int kValue>
using Number = std::integral_constant<int, kValue>;
template <sglang_hybrid::cuda::Format kValue>
using FormatOf = std::integral_constant<sglang_hybrid::cuda::Format, kValue>;

// Call use(head_dim, channels, format) with the values of `digests` as constants of the compiler.
template <class Use>
cudaError_t for_shape(const sh_digests& digests, Use use) {
    using sglang_hybrid::cuda::Format;
    const auto with_format = [&](auto dim, auto channels) {
        return digests.compact ? use(dim, channels, FormatOf<Format::compact>{})
                               : use(dim, channels, FormatOf<Format::minmax>{});
    };
    const auto with_channels = [&](auto dim) {
        switch (digests.channel_count) {
            // there are no compact digests without sketches
            case 0: return digests.compact ? cudaErrorInvalidValue : use(dim, Number<0>{}, FormatOf<Format::minmax>{});
            case 32: return with_format(dim, Number<32>{});
            case 64: return with_format(dim, Number<64>{});
            default: return cudaErrorInvalidValue;
        }
    };
    if (uint64_t{digests.pages} * digests.kv_heads > UINT32_MAX)
        return cudaErrorInvalidValue;  // kernels count blocks in 32 bits
    switch (digests.head_dim) {
        case 64: return with_channels(Number<64>{});
        case 128: return with_channels(Number<128>{});
        default: return cudaErrorInvalidValue;
    }
}

// Call use(Element{}) for the dtype of queries, which digests have too, unless they are compact.
template <class Use>
cudaError_t for_element(const sh_digests& digests, Use use) {
    switch (sglang_hybrid::query_dtype(static_cast<sglang_hybrid::DType>(digests.dtype))) {
        case sglang_hybrid::DType::bf16: return use(sglang_hybrid::cuda::BFloat16{});
        case sglang_hybrid::DType::fp16: return use(sglang_hybrid::cuda::Float16{});
        default: return cudaErrorInvalidValue;
    }
}
