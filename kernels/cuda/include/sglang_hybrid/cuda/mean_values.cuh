// The mean of a row's values, by a sample of its blocks in the host pool: `sampled_mean` of the reference.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/fp8.cuh"
#include "sglang_hybrid/cuda/halves.cuh"
#include "sglang_hybrid/cuda/left_out_api.h"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/slot_table.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t mean_threads = 256;

struct MeanMemory {
    float sums[mean_threads][8];
    int32_t pages[sh_sampled_blocks];
};

// Write the mean of a pair. A thread has eight channels of every n-th token. Called by a whole CTA of mean_threads.
template <class Element, class Stored>
__device__ void write_mean(const sh_mean_values& args, MeanMemory& memory, uint32_t entry, uint32_t row, uint32_t head) {
    using Chunk = Eight<Element, Stored>;
    const sh_slot_table numbers{nullptr, args.rows, 0, args.sink, args.recent};
    const RowBlocks blocks(args.step.lengths[entry], numbers, args.step.max_blocks);
    const uint32_t candidates = static_cast<uint32_t>(max(blocks.last - blocks.first, 0));
    const uint32_t samples = min(candidates, uint32_t{sh_sampled_blocks});
    for (uint32_t i = threadIdx.x; i < samples; i += mean_threads) {
        const uint32_t position = static_cast<uint32_t>(blocks.first) + i * candidates / samples;
        memory.pages[i] = args.step.page_table[uint64_t{entry} * args.step.max_blocks + position];
    }
    __syncthreads();
    const uint32_t row_chunks = args.head_dim / 8, of_token = threadIdx.x % row_chunks;
    const uint32_t tokens_at_once = mean_threads / row_chunks;
    const auto* const values = static_cast<const typename Chunk::Bits*>(args.values);
    const auto has_page = [&](uint32_t i) {
        return i < samples && memory.pages[i] >= 0 && static_cast<uint32_t>(memory.pages[i]) < args.pool_pages;
    };
    uint32_t counted = 0;
    for (uint32_t i = 0; i < samples; ++i) counted += has_page(i);
    const uint32_t mine = threadIdx.x < tokens_at_once * row_chunks ? threadIdx.x / row_chunks : block_tokens;
    float sums[8] = {};
    for (uint32_t token = mine; token < block_tokens; token += tokens_at_once) {
        constexpr uint32_t at_once = 8;  // loads over PCIe that a thread has in flight
        for (uint32_t first = 0; first < samples; first += at_once) {
            typename Chunk::Bits loaded[at_once];
#pragma unroll
            for (uint32_t i = 0; i < at_once; ++i) {
                const uint64_t page = has_page(first + i) ? static_cast<uint32_t>(memory.pages[first + i]) : 0;
                const uint64_t in_block = token * row_chunks + of_token;
                loaded[i] = {};
                if (has_page(first + i))
                    loaded[i] = values[(page * args.kv_heads + head) * block_tokens * row_chunks + in_block];
            }
#pragma unroll
            for (uint32_t i = 0; i < at_once; ++i) {
                const uint4 eight = Chunk::widened(loaded[i]);
                const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (uint32_t c = 0; c < 8; ++c) sums[c] += widened<Element>(static_cast<uint16_t>(words[c / 2] >> c % 2 * 16));
            }
        }
    }
#pragma unroll
    for (uint32_t c = 0; c < 8; ++c) memory.sums[threadIdx.x][c] = sums[c];
    __syncthreads();
    float* const mean = args.means + (uint64_t{row} * args.kv_heads + head) * args.head_dim;
    for (uint32_t channel = threadIdx.x; channel < args.head_dim; channel += mean_threads) {
        float sum = 0;
        for (uint32_t token = 0; token < tokens_at_once; ++token) {
            sum += memory.sums[token * row_chunks + channel / 8][channel % 8];
        }
        mean[channel] = counted ? sum / float(counted * block_tokens) : 0.0f;
    }
    __syncthreads();  // the memory is free
}

// A CTA for each (batch entry, KV head).
template <class Element, class Stored>
__global__ void __launch_bounds__(mean_threads) mean_values(const __grid_constant__ sh_mean_values args) {
    __shared__ MeanMemory memory;
    const uint32_t entry = blockIdx.x / args.kv_heads, head = blockIdx.x % args.kv_heads;
    if (entry >= active_of(args.step.active_rows, args.step.batch) || (args.only && !args.only[entry])) return;
    const int32_t row = args.step.row_of[entry];
    if (row < 0 || static_cast<uint32_t>(row) >= args.rows) return;
    write_mean<Element, Stored>(args, memory, entry, static_cast<uint32_t>(row), head);
}

}  // namespace sglang_hybrid::cuda
