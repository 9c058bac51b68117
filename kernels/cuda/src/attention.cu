// Launchers of attention over slots, merging and gathering.
#include <algorithm>

#include "attend_launch.h"
#include "sglang_hybrid/cuda/gather_blocks.cuh"
#include "sglang_hybrid/cuda/merge.cuh"
#include "slot_launch.h"

using namespace sglang_hybrid;
using namespace sglang_hybrid::cuda;

namespace {

template <class Element, int kDim>
cudaError_t launch_attend(const sh_attend_slots& args, cudaStream_t stream) {
    constexpr uint32_t of_value = value_bytes<Element>;
    const AttendPlan plan = plan_attend(kDim, of_value);
    if (plan.error) return plan.error;
    const Spread spread{std::max(1u, args.slots), std::min(plan.ctas, args.units / 2)};
    // a CTA takes at least one slot for each of its warps
    const uint64_t slots = uint64_t{args.batch} * args.kv_heads * spread.slots;
    if (slots > UINT32_MAX / 2 || spread.ctas == 0) return cudaErrorInvalidValue;
    // the partial results of a list must fit the memory in which they are merged
    if (spread.slots / plan.warps + 2 > most_parts(kDim, of_value, plan.warps, args.group)) return cudaErrorInvalidValue;
    const uint32_t ctas = uint32_t(std::min<uint64_t>(spread.ctas, (slots + plan.warps - 1) / plan.warps));
    const auto kernel = attend_slots<Element, kDim>;
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(plan.shared_bytes));
    if (error) return error;
    kernel<<<ctas, plan.warps * warp_size, plan.shared_bytes, stream>>>(args, spread);
    return cudaGetLastError();
}

}  // namespace

// Write the number of partial results for which attend_slots needs memory to `units`: two for every CTA that the device runs at
// a time. `of_value`: bytes of a number in keys and values.
SH_CUDA_API int sh_cuda_attend_units(uint32_t head_dim, uint32_t of_value, uint32_t* units) {
    const AttendPlan plan = plan_attend(head_dim, of_value);
    *units = 2 * plan.ctas;
    return plan.error;
}

SH_CUDA_API int sh_cuda_attend_slots(const sh_attend_slots* args, cudaStream_t stream) {
    if (args->batch == 0 || args->kv_heads == 0) return cudaSuccess;
    const auto attend = [&](auto element, auto dim) { return launch_attend<decltype(element), dim()>(*args, stream); };
    if (!args->steps) return for_pools(args->dtype, args->head_dim, args->group, attend);
    return for_codes(args->dtype, args->head_dim, args->group, attend);
}

SH_CUDA_API int sh_cuda_merge(const sh_merge* args, cudaStream_t stream) {
    if (args->head_dim % 4) return cudaErrorInvalidValue;
    const uint64_t quads = uint64_t{args->batch} * args->heads * (args->head_dim / 4);
    if (quads == 0) return cudaSuccess;
    merge_sides<<<uint32_t((quads + merge_threads - 1) / merge_threads), merge_threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

SH_CUDA_API int sh_cuda_gather_blocks(const sh_gather_blocks* args, cudaStream_t stream) {
    if (args->block_bytes % 16 || args->slots == 0 || args->kv_heads == 0 || args->ctas == 0) return cudaErrorInvalidValue;
    if (args->capacity == 0) return cudaSuccess;
    return for_slots(args->steps, args->dtype, args->block_bytes, [&]<class Element>() {
        const auto kernel = gather_blocks<Element>;
        kernel<<<std::min(args->ctas, args->capacity), gather_threads, 0, stream>>>(*args);
        return cudaGetLastError();
    });
}
