// Launchers of selection and plans.
#include <algorithm>

#include "launching.h"
#include "sglang_hybrid/cuda/select_blocks.cuh"
#include "sglang_hybrid/cuda/share_scores.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

SH_CUDA_API int sh_cuda_share_scores(const sh_share_scores* args, cudaStream_t stream) {
    const sh_score_blocks& scored = args->scored;
    if (!scored.estimates || scored.group < 1 || scored.group > 2 * tile_heads) return cudaErrorInvalidValue;
    if (scored.step.batch == 0) return cudaSuccess;
    const auto kernel = scored.group > tile_heads ? share_scores<2> : share_scores<1>;
    kernel<<<scored.step.batch, finish_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_select_blocks(const sh_select_blocks* args, cudaStream_t stream) {
    const uint32_t ctas = args->step.batch * args->kv_heads, max_blocks = args->step.max_blocks;
    const uint32_t always = args->table.sink + args->table.recent + 1;
    if (args->budget > most_selected || args->budget < always || args->table.slots > most_slots || args->table.slots < always) {
        return cudaErrorInvalidValue;
    }
    // gathered blocks are in no other list, so this list must have room for all of them
    if (args->gather_share && args->gathered.capacity < uint64_t{ctas} * args->most_gathered) return cudaErrorInvalidValue;
    if (ctas == 0) return cudaSuccess;
    const uint32_t words = max_blocks + 2 * PositionSet::words(max_blocks);
    const uint32_t bytes = uint32_t(sizeof(SelectionMemory)) + words * uint32_t(sizeof(uint32_t));
    if (args->scored.estimates && (args->scored.group < 1 || args->scored.group > 2 * tile_heads)) return cudaErrorInvalidValue;
    const auto kernel = args->scored.group > tile_heads ? select_blocks<2> : select_blocks<1>;
    if (const auto error = allow_shared(kernel, bytes)) return error;
    kernel<<<ctas, select_threads, bytes, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_apply_plan(const sh_apply_plan* args, cudaStream_t stream) {
    if (args->plan.capacity == 0) return cudaSuccess;
    const uint64_t ctas = (args->plan.capacity + select_threads - 1) / select_threads;
    apply_plan<<<uint32_t(std::min<uint64_t>(ctas, 64)), select_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}
