// The end of a layer: launcher.
#include "digest_shapes.h"
#include "sglang_hybrid/cuda/finish_layer.cuh"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

template <class Element, int kDim, int kChannels, Format kFormat>
cudaError_t launch_finish(const sh_finish_layer& args, cudaStream_t stream) {
    using Memory = LayerMemory<kDim, kChannels, kFormat>;
    const Geometry& g = args.wait.geometry;
    const auto kernel = finish_layer<Element, kDim, kChannels, kFormat>;
    const uint32_t bytes = Memory::bytes(g.kv_heads * g.group);
    if (const auto error = allow_shared(kernel, bytes)) return error;
    kernel<<<args.wait.batch, Memory::threads, bytes, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace

SH_CUDA_API int sh_cuda_finish_layer(const sh_finish_layer* args, cudaStream_t stream) {
    const Geometry& g = args->wait.geometry;
    if (args->wait.batch > g.rows || g.group < 1 || g.group > shifted_group) return cudaErrorInvalidValue;
    if (args->wait.batch == 0) return cudaSuccess;
    sh_digests shape = args->digests;
    if (!args->query_ahead) shape = {.kv_heads = g.kv_heads, .head_dim = g.head_dim, .dtype = g.dtype};
    if (g.head_dim != shape.head_dim || g.dtype != shape.dtype || g.kv_heads != shape.kv_heads) return cudaErrorInvalidValue;
    return for_element(shape, [&](auto element) {
        return for_shape(shape, [&](auto dim, auto channels, auto format) {
            if (!args->query_ahead) return launch_finish<decltype(element), dim(), no_shift, Format::minmax>(*args, stream);
            // this kernel is not in a decode step any more: other formats are left out
            constexpr bool is_there = format() == Format::minmax || format() == Format::compact;
            if constexpr (is_there) return launch_finish<decltype(element), dim(), channels(), format()>(*args, stream);
            return cudaErrorInvalidValue;
        });
    });
}
