// Memory access of kernels: copies that run beside computation, matrices for the tensor cores, flags that the host sees.
#pragma once

#include <cstdint>

namespace sglang_hybrid::cuda {

// -- shared memory -----------------------------------------------------------------------------------------------------

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes from global to shared memory, asynchronously. Unless `counts`, nothing is read and zeros are written.
__device__ inline void copy_async(uint32_t to, const void* from, bool counts) {
    const uint32_t bytes = counts ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Return the policy for data that is read once in a step: the L2 cache evicts it before anything else.
__device__ inline uint64_t read_once_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ inline void copy_async(uint32_t to, const void* from, bool counts, uint64_t policy) {
    const uint32_t bytes = counts ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy)
                 : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most the `kPending` groups that were committed last are in flight.
template <int kPending>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Load four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// -- registers of a warp -----------------------------------------------------------------------------------------------

// Transpose an 8 x 8 matrix of 16-bit values: lane 4 * i + j has columns 2j and 2j + 1 of row i, before and after.
__device__ inline uint32_t transposed_matrix(uint32_t pair) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

// -- host memory -------------------------------------------------------------------------------------------------------

// Load 16 bytes that nothing writes while the kernel runs and that are read once: the L1 cache does not keep them.
__device__ inline uint4 load_once(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// Accesses to words that the host reads or writes while the kernel runs, at system scope.
__device__ inline uint64_t load_acquire(const uint64_t& word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
    return value;
}

__device__ inline void store_release(uint64_t& word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
}

__device__ inline void store_relaxed(uint64_t& word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
}

__device__ inline void store_relaxed(uint32_t& word, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(&word), "r"(value) : "memory");
}

__device__ inline void store_relaxed(float& word, float value) {
    store_relaxed(reinterpret_cast<uint32_t&>(word), __float_as_uint(value));
}

__device__ inline uint64_t now_ns() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// -- launches that overlap ---------------------------------------------------------------------------------------------

// Let the next launch begin early, if it overlaps (launching.h). It begins when all CTAs of the launch in front of it have
// called this, or are done.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the launch in front is done and what it wrote can be read. The launch in front waits in turn for the launches
// before it, if every one of its CTAs calls this, too.
__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// -- launches ----------------------------------------------------------------------------------------------------------

// Return how many of `batch` entries are real. The number in device memory is not trusted: it is limited to 0 to `batch`.
__device__ inline uint32_t active_of(const int32_t* active_rows, uint32_t batch) {
    if (!active_rows) return batch;
    const int32_t active = *active_rows;
    return active < 0 ? 0 : min(static_cast<uint32_t>(active), batch);
}

}  // namespace sglang_hybrid::cuda
