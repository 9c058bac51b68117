// How kernels that attend with the warps of attend_slots.cuh are launched.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launching.h"
#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/attend_slots.cuh"

inline constexpr uint32_t most_entries = 4096;  // of a step, whose blocks are added up in shared memory

// On the current device.
struct AttendPlan {
    cudaError_t error;
    uint32_t warps;
    uint32_t shared_bytes;
    uint32_t processors;
    uint32_t ctas;  // that the device runs at a time
};

// `more_bytes` of shared memory are for what the kernel has beside its warps.
inline AttendPlan plan_attend(uint32_t head_dim, uint32_t most_warps = sglang_hybrid::cuda::attend_warps,
                              uint32_t more_bytes = 0) {
    using sglang_hybrid::cuda::SharedMemory;
    int device = 0, processors = 0, of_cta = 0, of_processor = 0;
    AttendPlan plan{};
    plan.error = first_error({
        cudaGetDevice(&device),
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        cudaDeviceGetAttribute(&of_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        cudaDeviceGetAttribute(&of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
    });
    plan.warps = most_warps;
    while (plan.warps > 1 && SharedMemory(head_dim, plan.warps).bytes + more_bytes > uint32_t(of_cta)) plan.warps /= 2;
    plan.shared_bytes = SharedMemory(head_dim, plan.warps).bytes + more_bytes;
    plan.processors = uint32_t(processors);
    const uint32_t reserved = 1024;  // of every CTA, by CUDA
    plan.ctas = processors * std::clamp(of_processor / (plan.shared_bytes + reserved), 1u, 4u);
    return plan;
}

// use(Element{}, head_dim) for shapes that these kernels have, known at compile time.
template <class Use>
cudaError_t for_heads(uint32_t dtype, uint32_t head_dim, uint32_t group, Use use) {
    using namespace sglang_hybrid;
    if (group < 1 || group > cuda::query_rows) return cudaErrorInvalidValue;
    const auto with_dim = [&](auto element) {
        switch (head_dim) {
            case 64: return use(element, std::integral_constant<int, 64>{});
            case 96: return use(element, std::integral_constant<int, 96>{});
            case 128: return use(element, std::integral_constant<int, 128>{});
            case 256: return use(element, std::integral_constant<int, 256>{});
            default: return cudaErrorInvalidValue;
        }
    };
    switch (static_cast<DType>(dtype)) {
        case DType::bf16: return with_dim(cuda::BFloat16{});
        case DType::fp16: return with_dim(cuda::Float16{});
        default: return cudaErrorInvalidValue;
    }
}
