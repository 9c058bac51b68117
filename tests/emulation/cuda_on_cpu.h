// CUDA's words on a CPU, as far as the kernels of this project use them: one CTA at a time, a fiber for each thread.
//
// Fibers run in random order from one collective operation (shuffle, ballot, barrier, tensor core product) to the next,
// and CTAs in random order too, so that what depends on an order goes wrong. Asynchronous copies happen when they are
// waited for, and their targets hold garbage until then. Shared memory holds garbage at first.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint4 {
    uint32_t x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
struct float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulated {

struct Index {
    uint32_t x;
};
extern Index thread, block, threads, blocks;

void launch(uint32_t ctas, uint32_t threads, uint32_t shared_bytes, std::function<void()> kernel);

char* dynamic_shared();
uint32_t shared_address(const void* pointer);
char* at_shared(uint32_t address);

constexpr uint32_t most_bytes = 32;  // that a lane shows the others at a time
// What all lanes of this warp show, `most_bytes` apart; valid until the next but one.
const char* show(const void* mine, uint32_t bytes);
int barrier(bool counts);  // of the CTA; how many threads came with true

void copy_later(uint32_t to, const void* from, bool counts);
void commit();
void wait(uint32_t pending);

template <class T>
T of_lane(const char* all, uint32_t lane) {
    T value;
    std::memcpy(&value, all + lane * most_bytes, sizeof value);
    return value;
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define blockDim emulated::threads
#define gridDim emulated::blocks

// -- warps and CTAs ----------------------------------------------------------------------------------------------------

template <class T>
T __shfl_sync(uint32_t, T value, uint32_t lane) {
    return emulated::of_lane<T>(emulated::show(&value, sizeof value), lane % 32);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, uint32_t step) {
    return __shfl_sync(mask, value, (threadIdx.x % 32) ^ step);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t step) {
    const uint32_t lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane >= step ? lane - step : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
    const char* const all = emulated::show(&vote, sizeof vote);
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) votes |= uint32_t{emulated::of_lane<bool>(all, lane)} << lane;
    return votes;
}
inline void __syncwarp() { __ballot_sync(0xFFFFFFFF, true); }
inline void __syncthreads() { emulated::barrier(false); }
inline int __syncthreads_count(bool counts) { return emulated::barrier(counts); }
inline bool __syncthreads_or(bool vote) { return emulated::barrier(vote); }
inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote); }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    const char* const all = emulated::show(&value, sizeof value);
    for (uint32_t lane = 0; lane < 32; ++lane) value = std::max(value, emulated::of_lane<uint32_t>(all, lane));
    return value;
}
inline void __threadfence() {}

// -- memory and numbers ------------------------------------------------------------------------------------------------

template <class T, class U>
T atomicAdd(T* word, U value) {
    return std::exchange(*word, static_cast<T>(*word + value));
}
inline uint32_t atomicOr(uint32_t* word, uint32_t value) { return std::exchange(*word, *word | value); }
template <class T>
T atomicMax(T* word, std::type_identity_t<T> value) {
    return std::exchange(*word, *word < value ? value : *word);
}
template <class T>
T atomicExch(T* word, std::type_identity_t<T> value) {
    return std::exchange(*word, value);
}
template <class T>
T atomicCAS(T* word, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return *word == expected ? std::exchange(*word, value) : *word;
}
template <class T>
T __ldcg(const T* from) {
    return *from;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
// Byte i of the result is the one that the i-th nibble of `chosen` names: 0 to 3 of a, 4 to 7 of b.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t chosen) {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(both >> (chosen >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return bytes;
}
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <class A, class B>
auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}
using std::isfinite;
// rounded one by one: compiled without contraction
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __fmul_rn(float a, float b) { return a * b; }

// -- runtime -----------------------------------------------------------------------------------------------------------

enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;
enum {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaFuncAttributeMaxDynamicSharedMemorySize,
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// few, so that small launches are spread over CTAs as large ones are on a GPU
inline cudaError_t cudaDeviceGetAttribute(int* value, int which, int) {
    return *value = which == cudaDevAttrMultiProcessorCount ? 23 : 227 << 10, cudaSuccess;
}
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchConfig_t {
    uint32_t ctas, threads, bytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    uint32_t numAttrs;
};
template <class Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Argument), const Argument& argument) {
    emulated::launch(config->ctas, config->threads, config->bytes, [=] { kernel(argument); });
    return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, uint64_t bytes, cudaMemcpyKind, cudaStream_t) {
    return std::memcpy(to, from, bytes), cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Kernel, int, uint32_t) {
    return *ctas = 1, cudaSuccess;
}
