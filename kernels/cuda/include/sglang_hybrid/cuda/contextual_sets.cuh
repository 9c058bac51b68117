// Choice of the tokens before the window that are attended: by the moving averages of blocks that leave the window, and by the
// query for rows that begin.
#pragma once

#include "sglang_hybrid/cuda/block_logits.cuh"
#include "sglang_hybrid/cuda/salience_api.h"
#include "sglang_hybrid/cuda/slot_table.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t set_threads = logit_warps * warp_size;

// The window of one (row, KV head).
struct WindowOfRow {
    uint32_t head;
    uint64_t list;  // number of the (row, KV head)
    const int32_t* pages;  // [max_blocks]: pages of the row's blocks
    int32_t* positions;  // [slots]
    float* maw;  // [slots][32]
    int32_t* masks;  // [max_blocks]
    int32_t length, last, first;  // tokens, newest block, oldest block in the window

    __device__ WindowOfRow(const sh_contextual_sets& args, uint32_t entry, uint32_t head_, uint32_t row)
        : head(head_), list(uint64_t{row} * args.kv_heads + head_) {
        const uint32_t slots = args.table.slots;
        pages = args.step.page_table + uint64_t{entry} * args.step.max_blocks;
        positions = args.table.positions + list * slots;
        maw = args.maw + list * slots * block_tokens;
        masks = args.masks + list * args.step.max_blocks;
        length = args.step.lengths[entry];
        last = (length - 1) / static_cast<int32_t>(block_tokens);
        first = max(0, last + 1 - static_cast<int32_t>(slots));
    }
    __device__ bool in_pool(const sh_contextual_sets& args, int32_t block) const {
        return pages[block] >= 0 && static_cast<uint32_t>(pages[block]) < args.pool_pages;
    }
};

// Give the slot of the oldest block to the block that opens, and write the mask of the oldest block. Called by warp 0.
__device__ inline void open_block(const sh_contextual_sets& args, const WindowOfRow& row) {
    const uint32_t lane = threadIdx.x % warp_size, slot = static_cast<uint32_t>(row.last) % args.table.slots;
    if (row.first > 0) {
        const float least = args.beta / static_cast<float>(args.table.slots * block_tokens);
        const bool is_there = row.positions[slot] == row.first - 1;
        const bool is_salient = args.beta <= 0 || row.maw[slot * block_tokens + lane] > least;
        const uint32_t mask = __ballot_sync(0xFFFFFFFF, is_there && is_salient);
        if (lane == 0) row.masks[row.first - 1] = static_cast<int32_t>(mask);
    }
    __syncwarp();
    if (lane == 0) row.positions[slot] = row.last;
}

// Load the newest blocks into their slots; of the tail, the tokens that the pool has. Called by a whole CTA.
template <int kDim>
__device__ void load_window(const sh_contextual_sets& args, const WindowOfRow& row) {
    const uint32_t slots = args.table.slots;
    constexpr uint32_t chunks = Tile<kDim>::bytes / sizeof(uint4);
    for (uint32_t slot = threadIdx.x; slot < slots; slot += set_threads) {
        const int32_t at = static_cast<int32_t>(slot), ring = static_cast<int32_t>(slots);
        row.positions[slot] = at <= row.last ? row.last - (row.last - at) % ring : -1;
    }
    for (int32_t block = row.first; block <= row.last; ++block) {
        if (!row.in_pool(args, block)) {
            if (threadIdx.x == 0 && args.refused) atomicAdd(reinterpret_cast<unsigned long long*>(args.refused), 1ull);
            continue;
        }
        const uint64_t from = (uint64_t{static_cast<uint32_t>(row.pages[block])} * args.kv_heads + row.head) * chunks;
        const uint64_t to = (row.list * slots + static_cast<uint32_t>(block) % slots) * chunks;
        for (uint32_t i = threadIdx.x; i < chunks; i += set_threads) {
            const uint4 key = load_once(static_cast<const uint4*>(args.pool_keys) + from + i);
            const uint4 value = load_once(static_cast<const uint4*>(args.pool_values) + from + i);
            static_cast<uint4*>(args.key_slots)[to + i] = key;
            static_cast<uint4*>(args.value_slots)[to + i] = value;
        }
    }
    __threadfence();
    __syncthreads();
}

// Write the averages of the window's tokens, and the masks of all blocks before the window, by the weights that the query gives
// to the tokens. Called by a whole CTA.
template <class Element, int kDim>
__device__ void evaluate_row(const sh_contextual_sets& args, const WindowOfRow& row, const void* query, char* shared) {
    const uint32_t slots = args.table.slots, lane = threadIdx.x % warp_size;
    const BlockLogits<Element, kDim> logits_of(shared, query, args.group, args.scale);
    // the step's own token is not there yet
    const auto of_window = [&](uint32_t i) -> KeyBlock {
        const int32_t block = row.first + static_cast<int32_t>(i), tokens = row.length - 1 - block * 32;
        const auto* const keys = static_cast<const char*>(args.key_slots);
        return {keys + (row.list * slots + static_cast<uint32_t>(block) % slots) * Tile<kDim>::bytes,
                row.in_pool(args, block) ? static_cast<uint32_t>(min(max(tokens, 0), 32)) : 0};
    };
    const uint32_t window = static_cast<uint32_t>(row.last - row.first + 1);
    const float* const lse = logits_of.log_sums(window, of_window);
    const auto lse_of = [&](uint32_t g) { return lse[g]; };
    logits_of.for_each(window, of_window, [&](uint32_t i, uint32_t tokens, const float (&logits)[query_rows]) {
        const uint32_t slot = (static_cast<uint32_t>(row.first) + i) % slots;
        if (lane < tokens) row.maw[slot * block_tokens + lane] = logits_of.largest_weight(logits, lse_of);
    });
    __syncthreads();  // the memory of sums is free for the next list

    const auto of_host = [&](uint32_t i) -> KeyBlock {
        if (!row.in_pool(args, static_cast<int32_t>(i))) return {nullptr, 0};
        const uint64_t block = uint64_t{static_cast<uint32_t>(row.pages[i])} * args.kv_heads + row.head;
        return {static_cast<const char*>(args.pool_keys) + block * Tile<kDim>::bytes, block_tokens};
    };
    const uint32_t before = static_cast<uint32_t>(row.first);
    for (uint32_t i = threadIdx.x; i < before; i += set_threads) {
        row.masks[i] = args.beta <= 0 && row.in_pool(args, static_cast<int32_t>(i)) ? -1 : 0;
    }
    __syncthreads();
    if (args.beta > 0 && before) {
        logits_of.log_sums(before, of_host);
        const float least = args.beta / static_cast<float>(before * block_tokens);
        logits_of.for_each(before, of_host, [&](uint32_t i, uint32_t, const float (&logits)[query_rows]) {
            const uint32_t mask = __ballot_sync(0xFFFFFFFF, logits_of.largest_weight(logits, lse_of) > least);
            if (lane == 0) row.masks[i] = static_cast<int32_t>(mask);
        });
    }
    __syncthreads();
}

// List the blocks before the window that have salient tokens, in their order. Called by a whole CTA.
__device__ inline void list_blocks(const sh_contextual_sets& args, const WindowOfRow& row, uint64_t pair) {
    __shared__ uint32_t of_warp[logit_warps], tokens_of_warp[logit_warps];
    const uint32_t warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    int32_t* const pages = args.pages + pair * args.most_blocks;
    int32_t* const masks = args.list_masks + pair * args.most_blocks;
    uint32_t listed = 0, tokens = 0;
    for (uint32_t base = 0; base < static_cast<uint32_t>(row.first); base += set_threads) {
        const uint32_t block = base + threadIdx.x;
        const bool is_before = block < static_cast<uint32_t>(row.first);
        const int32_t mask = is_before && row.in_pool(args, static_cast<int32_t>(block)) ? row.masks[block] : 0;
        const uint32_t found = __ballot_sync(0xFFFFFFFF, mask != 0);
        if (lane == 0) of_warp[warp] = static_cast<uint32_t>(__popc(found));
        __syncthreads();
        uint32_t place = listed + static_cast<uint32_t>(__popc(found & ((1u << lane) - 1)));
        for (uint32_t other = 0; other < logit_warps; ++other) {
            if (other < warp) place += of_warp[other];
            listed += of_warp[other];
        }
        if (mask != 0 && place < args.most_blocks) {
            pages[place] = row.pages[block];
            masks[place] = mask;
            tokens += static_cast<uint32_t>(__popc(static_cast<uint32_t>(mask)));
        }
        __syncthreads();  // before other threads overwrite what this one still reads
    }
    for (uint32_t step = 16; step; step /= 2) tokens += __shfl_xor_sync(0xFFFFFFFF, tokens, step);
    if (lane == 0) tokens_of_warp[warp] = tokens;
    __syncthreads();
    if (threadIdx.x) return;
    args.counts[pair] = static_cast<int32_t>(min(listed, args.most_blocks));
    for (uint32_t other = 1; other < logit_warps; ++other) tokens += tokens_of_warp[other];
    if (args.counted) atomicAdd(reinterpret_cast<unsigned long long*>(args.counted), static_cast<unsigned long long>(tokens));
}

// A CTA for each (batch entry, KV head).
template <class Element, int kDim>
__global__ void __launch_bounds__(set_threads) contextual_sets(const __grid_constant__ sh_contextual_sets args) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t pair = blockIdx.x, entry = pair / args.kv_heads, head = pair % args.kv_heads;
    if (entry >= active_of(args.step.active_rows, args.step.batch)) return;
    const int32_t number = args.step.row_of[entry], length = args.step.lengths[entry];
    if (!row_exists(number, args.table) || length < 1 || length > static_cast<int32_t>(args.step.max_blocks * block_tokens)) {
        if (threadIdx.x == 0 && args.pages) args.counts[pair] = 0;
        return;
    }
    const WindowOfRow row(args, entry, head, static_cast<uint32_t>(number));
    if (!args.begins || args.begins[entry]) {
        load_window<kDim>(args, row);
        const auto* const query = static_cast<const char*>(args.query) + uint64_t{pair} * args.group * kDim * 2;
        evaluate_row<Element, kDim>(args, row, query, shared);
    } else if (length % static_cast<int32_t>(block_tokens) == 1) {
        if (threadIdx.x < warp_size) open_block(args, row);
        __syncthreads();
    }
    if (args.pages) list_blocks(args, row, pair);
}

}  // namespace sglang_hybrid::cuda
