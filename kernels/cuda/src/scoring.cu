// Launcher of score_blocks.
#include "digest_shapes.h"
#include "sglang_hybrid/cuda/score_blocks.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

// in scoring_bf16.cu and scoring_fp16.cu
template <class Element>
cudaError_t launch_score(const sh_score_blocks& args, cudaStream_t stream);
extern template cudaError_t launch_score<BFloat16>(const sh_score_blocks&, cudaStream_t);
extern template cudaError_t launch_score<Float16>(const sh_score_blocks&, cudaStream_t);

SH_CUDA_API int sh_cuda_score_blocks(const sh_score_blocks* args, cudaStream_t stream) {
    if (args->step.batch == 0 || args->digests.kv_heads == 0) return cudaSuccess;
    if (args->group < 1 || args->group > 2 * tile_heads || args->step.batch > most_score_entries) return cudaErrorInvalidValue;
    return for_element(args->digests, [&](auto element) { return launch_score<decltype(element)>(*args, stream); });
}
