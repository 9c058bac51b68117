// Prediction of queries without its GEMMs, which a library computes: norms before the GEMMs, norms and rotation behind them.
// Every value that `QueryPredictor` rounds to the model's dtype is rounded here, too.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/lanes_api.h"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t rms_threads = 512;
inline constexpr uint32_t rms_chunks = 4;  // of 16 bytes, that a thread keeps in registers
inline constexpr uint32_t most_rms_width = rms_threads * rms_chunks * 8;
inline constexpr uint32_t finish_warps = 4;  // each has a query head
inline constexpr uint32_t finish_threads = finish_warps * 32;

template <class Element>
__device__ float low_of(uint32_t pair) {
    return widened<Element>(static_cast<uint16_t>(pair));
}
template <class Element>
__device__ float high_of(uint32_t pair) {
    return widened<Element>(static_cast<uint16_t>(pair >> 16));
}

// Apply an operation to two pairs of values, and round each result to the dtype.
template <class Element, class Operation>
__device__ uint32_t pairwise(uint32_t a, uint32_t b, Operation operation) {
    return Element::pack(operation(low_of<Element>(a), low_of<Element>(b)),
                         operation(high_of<Element>(a), high_of<Element>(b)));
}

template <class Element, class Operation>
__device__ uint4 chunkwise(uint4 a, uint4 b, Operation operation) {
    return {pairwise<Element>(a.x, b.x, operation), pairwise<Element>(a.y, b.y, operation),
            pairwise<Element>(a.z, b.z, operation), pairwise<Element>(a.w, b.w, operation)};
}

__device__ inline float warp_sum(float value) {
#pragma unroll
    for (uint32_t step = 16; step; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    return value;
}

// -- before the projection ---------------------------------------------------------------------------------------------

// A CTA for each row, which it reads once.
template <class Element>
__global__ void __launch_bounds__(rms_threads) unit_rms(const __grid_constant__ sh_unit_rms args) {
    __shared__ float sums[rms_threads / 32];
    const uint32_t row = blockIdx.x, chunks = args.width / 8;
    if (row >= active_of(args.active_rows, args.batch)) return;
    const auto* const hidden =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.hidden) + row * args.hidden_stride);
    const auto* const residual =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.residual) + row * args.residual_stride);
    const auto* const gain = static_cast<const uint4*>(args.gain);

    uint4 x[rms_chunks];
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < rms_chunks; ++i) {
        const uint32_t chunk = i * rms_threads + threadIdx.x;
        if (chunk >= chunks) break;
        x[i] = hidden[chunk];
        if (args.residual) x[i] = chunkwise<Element>(x[i], residual[chunk], [](float a, float b) { return a + b; });
        const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (const uint32_t word : words) {
            const float low = low_of<Element>(word), high = high_of<Element>(word);
            sum += low * low + high * high;
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(threadIdx.x % 32 < rms_threads / 32 ? sums[threadIdx.x % 32] : 0.0f);
    const float factor = rsqrtf(sum / static_cast<float>(args.width) + args.eps);

#pragma unroll
    for (uint32_t i = 0; i < rms_chunks; ++i) {
        const uint32_t chunk = i * rms_threads + threadIdx.x;
        if (chunk >= chunks) break;
        const uint4 unit = chunkwise<Element>(x[i], x[i], [&](float a, float) { return a * factor; });
        const uint64_t to = uint64_t{row} * chunks + chunk;
        if (args.unit) static_cast<uint4*>(args.unit)[to] = unit;
        if (!args.normed) continue;
        static_cast<uint4*>(args.normed)[to] = chunkwise<Element>(unit, gain[chunk], [](float a, float b) { return a * b; });
    }
}

// -- behind it ---------------------------------------------------------------------------------------------------------

// The row of a position in the rotary table, whose values are float or the model's dtype.
template <class Element>
struct RotaryRow {
    const void* row;
    bool is_float;

    __device__ float operator[](uint32_t index) const {
        return is_float ? static_cast<const float*>(row)[index] : widened<Element>(static_cast<const uint16_t*>(row)[index]);
    }
};

template <class Element>
__device__ RotaryRow<Element> rotary_row(const sh_finish_queries& args, uint32_t entry) {
    const bool is_float = static_cast<DType>(args.rotary_dtype) == DType::fp32;
    // a position beyond the table belongs to no real query, but must not be read
    const int64_t position = min(max(args.positions[entry], int64_t{0}), static_cast<int64_t>(args.rotary_rows) - 1);
    const uint64_t bytes = static_cast<uint64_t>(position) * args.rotary_dim * (is_float ? 4 : 2);
    return {static_cast<const char*>(args.rotary) + bytes, is_float};
}

// Return channel c of a head after the rotation. Products and sums are rounded one by one, as in `rotate` of the reference.
template <class Element>
__device__ float turned(const float* head, uint32_t c, const RotaryRow<Element>& row, uint32_t rotary_dim, bool neox) {
    if (c >= rotary_dim) return head[c];
    const uint32_t half = rotary_dim / 2, angle = neox ? (c < half ? c : c - half) : c / 2;
    const bool is_first = neox ? c < half : c % 2 == 0;
    const uint32_t other = neox ? (is_first ? c + half : c - half) : c ^ 1;
    const float own = __fmul_rn(head[c], row[angle]), crossed = __fmul_rn(head[other], row[half + angle]);
    return is_first ? __fsub_rn(own, crossed) : __fadd_rn(own, crossed);
}

// A warp for each (batch entry, query head).
template <class Element>
__global__ void __launch_bounds__(finish_threads) finish_queries(const __grid_constant__ sh_finish_queries args) {
    __shared__ float values[finish_warps][max_head_dim];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = args.head_dim / 2;
    const uint64_t head = uint64_t{blockIdx.x} * finish_warps + warp;
    if (head >= uint64_t{active_of(args.active_rows, args.batch)} * args.heads) return;
    const auto entry = static_cast<uint32_t>(head / args.heads);
    const uint64_t first = head * pairs, of_head = head % args.heads * args.head_dim;
    float* const mine = values[warp];

    float sum = 0;
    for (uint32_t i = lane; i < pairs; i += 32) {
        const uint32_t word = static_cast<const uint32_t*>(args.projected)[first + i];
        float low = low_of<Element>(word), high = high_of<Element>(word);
        if (args.addend) {
            const uint32_t more = static_cast<const uint32_t*>(args.addend)[first + i];
            low += low_of<Element>(more), high += high_of<Element>(more);
        }
        if (args.bias) low += args.bias[of_head + 2 * i], high += args.bias[of_head + 2 * i + 1];
        const uint32_t rounded = Element::pack(low, high);
        mine[2 * i] = low = low_of<Element>(rounded);
        mine[2 * i + 1] = high = high_of<Element>(rounded);
        sum += low * low + high * high;
    }
    if (args.gain) {
        const float factor = rsqrtf(warp_sum(sum) / static_cast<float>(args.head_dim) + args.eps);
        for (uint32_t i = lane; i < pairs; i += 32) {
            const uint32_t rounded =
                Element::pack(mine[2 * i] * factor * args.gain[2 * i], mine[2 * i + 1] * factor * args.gain[2 * i + 1]);
            mine[2 * i] = low_of<Element>(rounded);
            mine[2 * i + 1] = high_of<Element>(rounded);
        }
    }
    __syncwarp();
    const RotaryRow<Element> row = rotary_row<Element>(args, entry);
    for (uint32_t i = lane; i < pairs; i += 32) {
        static_cast<uint32_t*>(args.out)[first + i] = Element::pack(turned(mine, 2 * i, row, args.rotary_dim, args.neox),
                                                                    turned(mine, 2 * i + 1, row, args.rotary_dim, args.neox));
    }
}

}  // namespace sglang_hybrid::cuda
