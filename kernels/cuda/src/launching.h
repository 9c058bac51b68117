// What launchers share.
#pragma once

#include <cuda_runtime.h>

#include <initializer_list>

#define SH_CUDA_API extern "C" __attribute__((visibility("default")))

inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
    for (const cudaError_t error : errors) {
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
