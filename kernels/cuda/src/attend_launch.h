// Launch parameters of the kernels that attend with the warps of attend_slots.cuh.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launching.h"
#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/attend_slots.cuh"

inline constexpr uint32_t most_entries = 4096;  // of a step: shared memory adds up the blocks of all entries

// Launch parameters on the current device.
struct AttendPlan {
    cudaError_t error;
    uint32_t warps;
    uint32_t shared_bytes;
    uint32_t processors;
    uint32_t ctas;  // that the device runs at a time
};

// Return the launch parameters of a kernel. `of_value`: bytes of a number in keys and values. `more_bytes`: shared memory that
// the kernel needs besides that of its warps.
inline AttendPlan plan_attend(uint32_t head_dim, uint32_t of_value, uint32_t most_warps = sglang_hybrid::cuda::attend_warps,
                              uint32_t more_bytes = 0) {
    using namespace sglang_hybrid::cuda;
    const auto shared_bytes = [&](uint32_t warps) { return SharedMemory(head_dim, warps, of_value).bytes + more_bytes; };
    int device = 0, processors = 0, of_cta = 0, of_processor = 0;
    AttendPlan plan{};
    plan.error = first_error({
        cudaGetDevice(&device),
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        cudaDeviceGetAttribute(&of_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        cudaDeviceGetAttribute(&of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
    });
    plan.warps = most_warps;
    while (plan.warps > 1 && shared_bytes(plan.warps) > uint32_t(of_cta)) plan.warps /= 2;
    plan.shared_bytes = shared_bytes(plan.warps);
    plan.processors = uint32_t(processors);
    const uint32_t reserved = 1024;  // bytes that CUDA reserves in every CTA's shared memory
    const uint32_t most = std::max(1u, resident_warps / plan.warps);
    plan.ctas = processors * std::clamp(of_processor / (plan.shared_bytes + reserved), 1u, most);
    return plan;
}

// Call use(Element{}, head_dim), with head_dim as a constant of the compiler, for the values that these kernels support.
template <class Element, class Use>
cudaError_t for_head_dim(uint32_t head_dim, Use use) {
    switch (head_dim) {
        case 64: return use(Element{}, std::integral_constant<int, 64>{});
        case 96: return use(Element{}, std::integral_constant<int, 96>{});
        case 128: return use(Element{}, std::integral_constant<int, 128>{});
        case 256: return use(Element{}, std::integral_constant<int, 256>{});
        default: return cudaErrorInvalidValue;
    }
}

// Call `use` as for_head_dim does, for keys and values of the queries' dtype.
template <class Use>
cudaError_t for_heads(uint32_t dtype, uint32_t head_dim, uint32_t group, Use use) {
    using namespace sglang_hybrid;
    if (group < 1 || group > cuda::query_rows) return cudaErrorInvalidValue;
    switch (static_cast<DType>(dtype)) {
        case DType::bf16: return for_head_dim<cuda::BFloat16>(head_dim, use);
        case DType::fp16: return for_head_dim<cuda::Float16>(head_dim, use);
        default: return cudaErrorInvalidValue;
    }
}

// Call `use` as for_heads does, for keys and values that may also be FP8.
template <class Use>
cudaError_t for_pools(uint32_t dtype, uint32_t head_dim, uint32_t group, Use use) {
    using namespace sglang_hybrid;
    const auto both = static_cast<DType>(dtype);
    if (both != DType::fp8_bf16 && both != DType::fp8_fp16) return for_heads(dtype, head_dim, group, use);
    if (group < 1 || group > cuda::query_rows) return cudaErrorInvalidValue;
    switch (head_dim) {  // the values that the engine serves
        case 64: return use(cuda::Fp8{}, std::integral_constant<int, 64>{});
        case 128: return use(cuda::Fp8{}, std::integral_constant<int, 128>{});
        default: return cudaErrorInvalidValue;
    }
}

// Call `use` as for_heads does, for keys and values that are codes. `dtype`: of the queries.
template <class Use>
cudaError_t for_codes(uint32_t dtype, uint32_t head_dim, uint32_t group, Use use) {
    using namespace sglang_hybrid;
    const auto query = static_cast<DType>(dtype);
    if (group < 1 || group > cuda::query_rows || (query != DType::bf16 && query != DType::fp16)) return cudaErrorInvalidValue;
    switch (head_dim) {  // the values that the engine serves
        case 64: return use(cuda::Coded{}, std::integral_constant<int, 64>{});
        case 128: return use(cuda::Coded{}, std::integral_constant<int, 128>{});
        default: return cudaErrorInvalidValue;
    }
}
