// Stores the keys and values of one decode step in slots and in the host pool, and updates digests and codes of the tails.
#pragma once

#include "sglang_hybrid/cuda/digest_blocks.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/slot_codes.cuh"
#include "sglang_hybrid/cuda/slot_table.cuh"

namespace sglang_hybrid::cuda {

// The slot of the tail of a (row, KV head). A tail without a slot gets one from tail_slot: usually selection gave it one;
// otherwise this is the first token of a block, or of a row whose slots were never filled.
struct TailSlot {
    int32_t slot;  // -1: the tail has none
    bool is_new;  // earlier tokens of the block are not in the slot yet
};

__device__ inline TailSlot tail_slot(const sh_append& args, uint32_t entry, uint32_t row, uint32_t head,
                                     const RowBlocks& blocks) {
    int32_t* const positions = args.table.positions + (uint64_t{row} * args.digests.kv_heads + head) * args.table.slots;
    int32_t slot = find_slot(positions, args.table, blocks.tail());
    if (slot >= 0) return {slot, false};
    const uint64_t list = uint64_t{args.scores_by_row ? row : entry} * args.digests.kv_heads + head;
    slot = slot_for_tail(positions, args.table, blocks, args.scores ? args.scores + list * args.step.max_blocks : nullptr);
    __syncwarp();
    if (slot >= 0 && threadIdx.x % 32 == 0) positions[slot] = blocks.tail();
    return {slot, true};
}

// Copy the queries of a (row, KV head) to kept_queries, which are used once whole rows are no longer held. The last threads
// begin, because the first ones have the new key and value to copy. Called by a whole CTA.
__device__ inline void keep_queries(const sh_append& args, uint32_t entry, uint32_t row, uint32_t head) {
    if (!args.query || !args.kept_queries) return;
    const uint32_t heads = args.digests.kv_heads, chunks = args.group * args.digests.head_dim / 8;
    const auto* const query = static_cast<const uint4*>(args.query) + (uint64_t{entry} * heads + head) * chunks;
    auto* const kept = static_cast<uint4*>(args.kept_queries) + (uint64_t{row} * heads + head) * chunks;
    for (uint32_t i = digest_threads - 1 - threadIdx.x; i < chunks; i += digest_threads) kept[i] = query[i];
    if (threadIdx.x == digest_threads - 1 && head == 0) args.kept_lengths[row] = args.step.lengths[entry];
}

// A CTA for each (batch entry, KV head). Keys and values are `Element`s and are stored as `Stored`, in slots as codes if kCoded.
// Digests are computed from the stored keys: from those in the slot, if the tail has one.
template <class Element, class Stored, bool kCoded>
__global__ void __launch_bounds__(digest_threads) append_tokens(const __grid_constant__ sh_append args) {
    using Chunk = Eight<Element, Stored>;
    using Slots = SlotEight<Element, Stored, kCoded>;
    __shared__ __align__(16) SharedBlock block;
    __shared__ TailSlot tail;
    const uint32_t heads = args.digests.kv_heads, dim = args.digests.head_dim, row_chunks = dim / 8;
    const uint32_t entry = blockIdx.x / heads, head = blockIdx.x % heads;
    let_next_begin();
    // Only dense steps overlap: the tables that are read for them before the wait do not change during a step.
    if (!args.dense.pages) wait_for_launch_before();
    if (entry >= active_of(args.step.active_rows, args.step.batch)) {
        wait_for_launch_before();
        return;
    }
    const int32_t row = args.step.row_of[entry], length = args.step.lengths[entry];
    const RowBlocks blocks(length, args.table, args.step.max_blocks);
    const int32_t page = blocks.count > 0 ? args.step.page_table[uint64_t{entry} * args.step.max_blocks + blocks.tail()] : -1;
    const bool in_pool = page >= 0 && static_cast<uint32_t>(page) < args.digests.pages;
    if (!in_pool || !row_exists(row, args.table) || length > static_cast<int32_t>(args.step.max_blocks * block_tokens)) {
        if (threadIdx.x == 0 && head == 0 && args.refused) atomicAdd(reinterpret_cast<unsigned long long*>(args.refused), 1ull);
        wait_for_launch_before();
        return;
    }
    uint64_t in_slots = 0;
    if (!args.keys) {
        if (threadIdx.x == 0) tail = {-1, false};
        __syncthreads();
    } else if (args.dense.pages) {
        // the row is held as a whole: its tail has a page, which has the earlier tokens
        const int32_t held = args.dense.pages[uint64_t{static_cast<uint32_t>(row)} * args.dense.max_blocks + blocks.tail()];
        const bool has_page =
            blocks.tail() < args.dense.held[row] && held >= 0 && static_cast<uint32_t>(held) < args.dense.device_pages;
        if (threadIdx.x == 0) tail = {has_page ? 0 : -1, false};
        in_slots = has_page ? uint64_t{static_cast<uint32_t>(held)} * heads + head : 0;
        __syncthreads();
    } else {
        if (threadIdx.x < 32) {
            const TailSlot found = tail_slot(args, entry, static_cast<uint32_t>(row), head, blocks);
            if (threadIdx.x == 0) tail = found;
        }
        __syncthreads();
        in_slots = (uint64_t{static_cast<uint32_t>(row)} * heads + head) * args.table.slots + max(tail.slot, 0);
    }

    wait_for_launch_before();
    keep_queries(args, entry, static_cast<uint32_t>(row), head);

    const uint32_t token = static_cast<uint32_t>(length - 1) % block_tokens;
    const uint64_t in_pool_block = uint64_t{static_cast<uint32_t>(page)} * heads + head;
    const uint64_t block_chunks = uint64_t{block_tokens} * row_chunks;
    auto* const shared_keys = reinterpret_cast<uint4*>(block.keys);
    auto* const key_slot = static_cast<typename Slots::Bits*>(args.key_slots) + in_slots * block_chunks;
    auto* const value_slot = static_cast<typename Slots::Bits*>(args.value_slots) + in_slots * block_chunks;
    auto* const pool_keys = static_cast<typename Chunk::Bits*>(args.pool_keys) + in_pool_block * block_chunks;
    auto* const pool_values = static_cast<typename Chunk::Bits*>(args.pool_values) + in_pool_block * block_chunks;
    const CodeSteps steps(args.steps, heads, dim, head);
    uint16_t* const key_factors = args.factors ? args.factors + in_slots * slot_factors : nullptr;
    const TokenLanes lanes{row_chunks};

    // digests of tails are not read while whole rows are held: they are computed with the block's last token
    const bool is_due = !args.keys || !args.dense.pages || token + 1 == block_tokens;
    const bool digests = is_due && args.digests.digests;
    const uint32_t earlier = digests || (is_due && tail.slot >= 0) ? token : 0;
    // earlier tokens come from the pool if the slot does not have them
    const bool from_pool = tail.slot < 0 || tail.is_new;
    // lanes of a warp stay together, since those of a token find its factor together
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t first = threadIdx.x - lane; first < earlier * row_chunks; first += digest_threads) {
        const uint32_t i = first + lane;
        const bool counts = i < earlier * row_chunks;
        if (tail.slot < 0) {
            if (counts) shared_keys[i] = Chunk::widened(pool_keys[i]);
            continue;
        }
        uint16_t* const factor = counts ? key_factors + i / row_chunks : nullptr;  // used with codes only
        if (from_pool) {
            const auto key = Slots::of_pool(counts ? pool_keys[i] : typename Chunk::Bits{}, steps.per_key_step, lanes, factor);
            const auto value = Slots::of_pool(counts ? pool_values[i] : typename Chunk::Bits{}, steps.per_value_step, lanes,
                                              counts ? factor + block_tokens : nullptr);
            if (counts) key_slot[i] = key, value_slot[i] = value;
            __syncwarp();  // one lane of a token has written its factor
        }
        if (counts) shared_keys[i] = Slots::widened(key_slot[i], steps.keys, lanes, factor);
    }
    if (args.keys && threadIdx.x < 32) {
        const bool counts = lane < row_chunks;
        const uint32_t in_row = head * row_chunks + lane, to = token * row_chunks + lane;
        const auto load = [&](const void* from, uint64_t stride) {
            const auto* const chunks = static_cast<const uint4*>(from) + entry * stride / 8 + in_row;
            return counts ? Chunk::stored(*chunks) : typename Chunk::Bits{};
        };
        const auto key = load(args.keys, args.key_stride), value = load(args.values, args.value_stride);
        if (counts) pool_keys[to] = key, pool_values[to] = value;
        if (tail.slot < 0) {
            if (counts) shared_keys[to] = Chunk::widened(key);
        } else {
            uint16_t* const factor = counts ? key_factors + token : nullptr;
            const auto key_in_slot = Slots::of_pool(key, steps.per_key_step, lanes, factor);
            const auto value_in_slot =
                Slots::of_pool(value, steps.per_value_step, lanes, counts ? factor + block_tokens : nullptr);
            __syncwarp();
            if (counts) {
                shared_keys[to] = Slots::widened(key_in_slot, steps.keys, lanes, factor);
                key_slot[to] = key_in_slot;
                value_slot[to] = value_in_slot;
            }
        }
    }
    const uint32_t tokens = args.keys ? token + 1 : token;
    if (digests && tokens) digest_block<Element>(block, tokens, args.digests, static_cast<uint32_t>(page), head);
}

}  // namespace sglang_hybrid::cuda
