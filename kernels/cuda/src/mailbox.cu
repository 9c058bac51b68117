// Launchers for posting to the worker and waiting for it.
#include "launching.h"
#include "sglang_hybrid/cuda/mailbox.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_mailbox_attach(sh_mailbox_state* state, uint64_t mailbox, uint64_t sequence, cudaStream_t stream) {
    attach_mailbox<<<1, 1, 0, stream>>>(state, mailbox, sequence);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_mailbox_post(const sh_mailbox_post* args, cudaStream_t stream) {
    const Geometry& g = args->geometry;
    if (args->batch > g.rows || args->layer >= g.layers || g.kv_heads > most_kv_heads) return cudaErrorInvalidValue;
    if (args->masks && !(g.flags & geometry_masks)) return cudaErrorInvalidValue;
    const bool sums = args->weights && args->positions && !args->query && !args->masks && (g.flags & geometry_value_sums);
    const bool attends = !args->weights && args->query && args->last_fill;
    if (!sums && !attends) return cudaErrorInvalidValue;
    post_layer<<<args->batch + 1, post_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_mailbox_wait(const sh_mailbox_wait* args, cudaStream_t stream) {
    const Geometry& g = args->geometry;
    const uint32_t lse_bytes = g.kv_heads * g.group * uint32_t(sizeof(float));
    if (args->batch > g.rows || lse_bytes > 48 * 1024) return cudaErrorInvalidValue;
    if (args->batch == 0) return cudaSuccess;
    wait_for_replies<<<args->batch, wait_threads, lse_bytes, stream>>>(*args);
    return cudaGetLastError();
}
