// Copies of the new tokens of prefill, which the model computes token by token, to staged pages, which are head by head.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/fp8.cuh"
#include "sglang_hybrid/cuda/prefill_api.h"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t place_threads = 256;  // chunks of key and value of a token of 8 KV heads of 128 channels

// A CTA for each token; a thread copies 16 bytes at a time. Tokens are `Element`s, and are staged as `Stored`.
template <class Element, class Stored>
__global__ void __launch_bounds__(place_threads) place_tokens(const __grid_constant__ sh_place_tokens args) {
    const uint32_t token = blockIdx.x;
    const int32_t place = args.places[token];
    if (place < 0 || static_cast<uint64_t>(place) >= args.most_places) {
        if (place != -1 && threadIdx.x == 0 && args.refused) {
            atomicAdd(reinterpret_cast<unsigned long long*>(args.refused), 1ull);
        }
        return;
    }
    const uint32_t head_chunks = args.head_dim / 8, chunks = args.kv_heads * head_chunks;
    const auto* const key = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.keys) + token * args.key_stride);
    const auto* const value =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.values) + token * args.value_stride);
    const uint64_t slot = static_cast<uint32_t>(place) / block_tokens, in_block = static_cast<uint32_t>(place) % block_tokens;
    for (uint32_t i = threadIdx.x; i < 2 * chunks; i += place_threads) {
        const uint32_t chunk = i < chunks ? i : i - chunks;
        const uint64_t block = slot * args.kv_heads + chunk / head_chunks;
        const uint64_t to = (block * block_tokens + in_block) * head_chunks + chunk % head_chunks;
        using Chunk = Eight<Element, Stored>;
        auto* const slots = static_cast<typename Chunk::Bits*>(i < chunks ? args.key_slots : args.value_slots);
        slots[to] = Chunk::stored((i < chunks ? key : value)[chunk]);
    }
}

}  // namespace sglang_hybrid::cuda
