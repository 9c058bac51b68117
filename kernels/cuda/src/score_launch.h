// Launcher of score_blocks for one dtype. Each dtype is compiled in a file of its own, since these kernels take longest to
// compile.
#pragma once

#include <algorithm>

#include "digest_shapes.h"
#include "sglang_hybrid/cuda/score_blocks.cuh"

// Most CTAs on a processor. They wait for the results of their own products most of the time, so more of them are faster.
constexpr int most_resident = 4;
// These CTAs stay as long as the launch takes. For each so many processors one CTA is left out, so that the main lane's small
// kernels find room meanwhile.
constexpr int processors_with_room = 4;

template <class Element, int kDim, int kChannels, sglang_hybrid::cuda::Format kFormat, int kTiles>
cudaError_t launch_score(const sh_score_blocks& args, cudaStream_t stream) {
    using namespace sglang_hybrid::cuda;
    const auto kernel = score_blocks<Element, kDim, kChannels, kFormat, kTiles>;
    const uint32_t bytes = ScoreMemory<kDim, kChannels, kFormat>::bytes(args.step.batch);
    int device = 0, processors = 0, of_processor = 0, resident = 0;
    const auto error = first_error({
        allow_shared(kernel, bytes),
        cudaGetDevice(&device),
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        cudaDeviceGetAttribute(&of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, int(score_threads), bytes),
    });
    if (error) return error;
    resident = std::clamp(std::min(resident, of_processor / 8 * 7 / int(bytes)), 1, most_resident);
    const int less = resident == most_resident ? processors / processors_with_room : 0;
    kernel<<<uint32_t(processors * resident - less), score_threads, bytes, stream>>>(args);
    return cudaGetLastError();
}

template <class Element>
cudaError_t launch_score(const sh_score_blocks& args, cudaStream_t stream) {
    return for_shape(args.digests, [&](auto dim, auto channels, auto format) {
        return args.group > sglang_hybrid::cuda::tile_heads
                   ? launch_score<Element, dim(), channels(), format(), 2>(args, stream)
                   : launch_score<Element, dim(), channels(), format(), 1>(args, stream);
    });
}
