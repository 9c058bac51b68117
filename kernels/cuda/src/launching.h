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
