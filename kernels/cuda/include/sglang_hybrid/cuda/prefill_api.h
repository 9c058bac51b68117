// C interface of the CUDA library for prefill. Conventions as in c_api.h.
//
// Prefill attends over staged pages, [slot][KV head][32][head_dim] in device memory. This is the layout of the pool: a page is
// one contiguous run on both sides.
#pragma once

#include <cstdint>

// Copy new tokens to staged pages. Token i goes to places[i] = 32 * slot + token of the page; -1: it is not copied. Places out
// of bounds are skipped and counted. For slots of FP8 the tokens are rounded to the nearest number.
struct sh_place_tokens {
    const void* keys;  // [tokens][KV head][head_dim] of 16 bits, tokens key_stride values apart
    const void* values;  // as keys, tokens value_stride values apart
    void* key_slots;  // [slots][KV head][32][head_dim]
    void* value_slots;  // as key_slots
    const int32_t* places;  // [tokens]
    uint64_t* refused;  // the number of places out of bounds is added; or null
    uint64_t key_stride;
    uint64_t value_stride;
    uint64_t most_places;  // 32 * slots
    uint32_t tokens;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t dtype;  // DType of slots and of tokens
};

// The reverse of sh_gather_blocks: copy block i of [owner][KV head][slots] to page pages[i] of the pool. The place in the list
// determines the KV head. Entries with page -1 are skipped; pages out of bounds are skipped and counted.
struct sh_scatter_blocks {
    const void* key_slots;
    const void* value_slots;
    void* keys;  // a layer of the pool, at its device address: [page][KV head] blocks
    void* values;  // as keys
    const int32_t* pages;
    uint64_t* refused;  // the number of pages out of bounds is added; or null
    uint32_t capacity;  // entries of the list
    uint32_t pool_pages;
    uint32_t kv_heads;
    uint32_t slots;
    uint32_t block_bytes;  // of a block's keys, or of its values; a multiple of 16
    uint32_t ctas;
};

// A run of pages that lie side by side both in the pool and in the staging.
struct sh_copy_run {
    int32_t page;  // first page in the pool
    int32_t slot;  // first slot of the staging
    int32_t pages;  // number of pages
};

// Copy runs of pages with the copy engine. All pointers are addresses as the host uses them, also those of the pool.
struct sh_copy_runs {
    void* keys;  // a layer of the pool in registered memory
    void* values;  // as keys
    void* key_slots;  // in device memory
    void* value_slots;  // as key_slots
    const sh_copy_run* runs;  // [count] in host memory
    uint64_t page_bytes;  // of a page's keys, or of its values, all KV heads
    uint32_t count;
    uint32_t pool_pages;
    uint32_t staged_pages;
    uint32_t to_pool;  // 1: from the staging to the pool, 0: from the pool to the staging
};
