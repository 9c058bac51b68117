// Copies of single tokens from registered host memory to staged blocks in device memory. The GPU itself reads over PCIe.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/speculation_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t gather_token_warps = 8;
inline constexpr uint32_t gather_token_loads = 4;  // of one thread before it stores the first

// Copy the first `count` tokens whose bit is set in `mask`, one behind the other from staged token `offset` on. `tokens`: [32]
// in shared memory, the warp's. Called by a whole warp.
__device__ inline void copy_tokens(const sh_gather_tokens& args, uint64_t block, uint64_t first_block, uint32_t head,
                                   uint32_t mask, uint32_t count, uint32_t offset, uint32_t* tokens) {
    const uint32_t lane = threadIdx.x % 32, chunks = args.token_bytes / sizeof(uint4);
    if (mask >> lane & 1) tokens[__popc(mask & ((1u << lane) - 1))] = lane;
    __syncwarp();
    const uint32_t all = count * 2 * chunks;  // of a token first its key, then its value
    const auto* const keys = static_cast<const uint4*>(args.keys) + block * block_tokens * chunks;
    const auto* const values = static_cast<const uint4*>(args.values) + block * block_tokens * chunks;
    for (uint32_t first = lane; first < all; first += gather_token_loads * 32) {
        uint4 loaded[gather_token_loads];
#pragma unroll
        for (uint32_t n = 0; n < gather_token_loads; ++n) {
            const uint32_t i = first + n * 32, chunk = i % (2 * chunks);
            if (i >= all) continue;
            const uint32_t from = tokens[i / (2 * chunks)] * chunks;
            loaded[n] = load_once(chunk < chunks ? keys + from + chunk : values + from + (chunk - chunks));
        }
#pragma unroll
        for (uint32_t n = 0; n < gather_token_loads; ++n) {
            const uint32_t i = first + n * 32, chunk = i % (2 * chunks);
            if (i >= all) continue;
            const uint32_t token = offset + i / (2 * chunks);
            const uint64_t staged = (first_block + token / block_tokens) * args.kv_heads + head;
            const uint64_t to = (staged * block_tokens + token % block_tokens) * chunks;
            if (chunk < chunks) static_cast<uint4*>(args.staged_keys)[to + chunk] = loaded[n];
            else static_cast<uint4*>(args.staged_values)[to + (chunk - chunks)] = loaded[n];
        }
    }
    __syncwarp();  // before `tokens` gets those of the next block
}

// All warps go through all lists and take blocks in turn. The turns continue from one list to the next, since most lists are
// short.
__global__ void __launch_bounds__(gather_token_warps * 32) gather_tokens(const __grid_constant__ sh_gather_tokens args) {
    __shared__ uint32_t tokens[gather_token_warps][32];
    const uint32_t warp = threadIdx.x / 32, warps = gridDim.x * gather_token_warps;
    const uint32_t number = blockIdx.x * gather_token_warps + warp;
    const uint32_t pairs = active_of(args.active_rows, args.batch) * args.kv_heads, staged = args.staged_blocks * block_tokens;
    uint32_t before = 0;  // blocks of the lists so far, modulo `warps`
    for (uint32_t pair = 0; pair < pairs; ++pair) {
        const uint32_t count = min(static_cast<uint32_t>(max(args.counts[pair], 0)), args.most_blocks);
        for (uint32_t i = (number + warps - before) % warps; i < count; i += warps) {
            const uint64_t at = uint64_t{pair} * args.most_blocks + i;
            const int32_t page = args.pages[at];
            const auto mask = static_cast<uint32_t>(args.masks[at]);
            // the step's own token, which is the last one, is not in the pool yet
            const uint32_t copied = static_cast<uint32_t>(__popc(mask)) - (i + 1 == count && mask);
            const auto offset = static_cast<uint32_t>(args.offsets[at]);
            const bool fits = offset <= staged && copied <= staged - offset;
            if (page < 0 || static_cast<uint32_t>(page) >= args.pool_pages || !fits) {
                if (threadIdx.x % 32 == 0 && args.refused) atomicAdd(reinterpret_cast<unsigned long long*>(args.refused), 1ull);
                continue;
            }
            const uint32_t head = pair % args.kv_heads, entry = pair / args.kv_heads;
            const uint64_t block = uint64_t{static_cast<uint32_t>(page)} * args.kv_heads + head;
            copy_tokens(args, block, uint64_t{entry} * args.staged_blocks, head, mask, copied, offset, tokens[warp]);
        }
        before = (before + count) % warps;
    }
}

}  // namespace sglang_hybrid::cuda
