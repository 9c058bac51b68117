// What the CUDA library offers for prefill; conventions as in c_api.h.
//
// Prefill attends over staged pages, [slot][KV head][32][head_dim] in device memory, the layout of the pool: a page is
// one contiguous run on both sides.
#pragma once

#include <cstdint>

// Token i goes to places[i] = 32 * slot + token of the page. -1 is none; places out of bounds are left out and counted. Slots
// of FP8 get what is nearest.
struct sh_place_tokens {
    const void* keys;  // [tokens][KV head][head_dim] of 16 bits, tokens key_stride values apart
    const void* values;
    void* key_slots;  // [slots][KV head][32][head_dim]
    void* value_slots;
    const int32_t* places;
    uint64_t* refused;  // added up; or null
    uint64_t key_stride;
    uint64_t value_stride;
    uint64_t most_places;  // 32 * slots
    uint32_t tokens;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t dtype;  // DType of slots and of tokens
};

// The reverse of sh_gather_blocks: block i of [owner][KV head][slots] goes to page pages[i] of the pool. The place in
// the list says which KV head it is. Page -1 is none; pages out of bounds are left out and counted.
struct sh_scatter_blocks {
    const void* key_slots;
    const void* value_slots;
    void* keys;  // a layer of the pool, as the device sees it: [page][KV head] blocks
    void* values;
    const int32_t* pages;
    uint64_t* refused;  // added up; or null
    uint32_t capacity;  // entries of the list
    uint32_t pool_pages;
    uint32_t kv_heads;
    uint32_t slots;
    uint32_t block_bytes;  // of keys or values; a multiple of 16
    uint32_t ctas;
};

// Pages that lie side by side in the pool and in the staging, by the copy engine. All pointers are the host's.
struct sh_copy_run {
    int32_t page;
    int32_t slot;
    int32_t pages;
};

struct sh_copy_runs {
    void* keys;  // a layer of the pool in registered memory
    void* values;
    void* key_slots;  // in device memory
    void* value_slots;
    const sh_copy_run* runs;
    uint64_t page_bytes;  // of keys or values, all KV heads
    uint32_t count;
    uint32_t pool_pages;
    uint32_t staged_pages;
    uint32_t to_pool;  // 1: from the staging to the pool, 0: the other way
};
