// Functions that launchers share.
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

// Allow a kernel `bytes` of dynamic shared memory, which may be more than every kernel may have.
template <class Kernel>
cudaError_t allow_shared(Kernel kernel, uint32_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

// Launch as kernel<<<ctas, threads, bytes, stream>>>(arguments) does. On devices that can do that (compute capability 9.0 or
// newer) the kernel begins before the kernel in front of it is done, and calls wait_for_launch_before() of memory.cuh to wait
// for it.
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
