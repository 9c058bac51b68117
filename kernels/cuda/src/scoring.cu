// Scores of blocks: launcher.
#include <algorithm>

#include "digest_shapes.h"
#include "sglang_hybrid/cuda/score_blocks.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

template <class Element, int kDim, int kChannels, int kTiles>
cudaError_t launch_score(const sh_score_blocks& args, cudaStream_t stream) {
    const auto kernel = score_blocks<Element, kDim, kChannels, kTiles>;
    const uint32_t bytes = ScoreMemory<kDim, kChannels>::bytes(args.step.batch);
    int device = 0, processors = 0, resident = 0;
    const auto error = first_error({
        allow_shared(kernel, bytes),
        cudaGetDevice(&device),
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, int(score_threads), bytes),
    });
    if (error) return error;
    kernel<<<uint32_t(processors * std::max(resident, 1)), score_threads, bytes, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace

SH_CUDA_API int sh_cuda_score_blocks(const sh_score_blocks* args, cudaStream_t stream) {
    if (args->step.batch == 0 || args->digests.kv_heads == 0) return cudaSuccess;
    if (args->group < 1 || args->group > 2 * tile_heads || args->step.batch > most_score_entries) return cudaErrorInvalidValue;
    return for_digests(args->digests, [&](auto element, auto dim, auto channels) {
        using Element = decltype(element);
        return args->group > tile_heads ? launch_score<Element, dim(), channels(), 2>(*args, stream)
                                        : launch_score<Element, dim(), channels(), 1>(*args, stream);
    });
}
