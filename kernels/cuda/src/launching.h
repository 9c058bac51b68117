// What launchers share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#define SH_CUDA_API extern "C" __attribute__((visibility("default")))

inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
    for (const cudaError_t error : errors) {
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// Dynamic shared memory beyond what every kernel may have.
template <class Kernel>
cudaError_t allow_shared(Kernel kernel, uint32_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

// As kernel<<<ctas, threads, bytes, stream>>>(arguments). Where devices can do that, it begins before the kernel in front of it
// is done; wait_for_launch_before() of memory.cuh says when that is.
template <class Arguments>
cudaError_t launch_overlapping(void (*kernel)(Arguments), uint32_t ctas, uint32_t threads, uint32_t bytes, cudaStream_t stream,
                               const Arguments& arguments) {
    int device = 0, generation = 0;
    const auto error = first_error({
        cudaGetDevice(&device),
        cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device),
    });
    if (error) return error;
    cudaLaunchAttribute overlaps{};
    overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlaps.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{ctas, threads, bytes, stream, &overlaps, generation >= 9 ? 1u : 0u};
    return cudaLaunchKernelEx(&config, kernel, arguments);
}
