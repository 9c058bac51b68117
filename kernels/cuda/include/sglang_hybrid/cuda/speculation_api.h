// What the CUDA library offers for policy infinigen: partial keys, the tokens that they speculate to matter, and their way to
// device memory. Conventions as in c_api.h.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// The first columns of each key in a basis of its KV head.
struct sh_partial_keys {
    void* codes;  // [page][KV head][32][columns] of `dtype`
    const float* basis;  // [KV head][head_dim][columns]
    uint32_t pages;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t columns;  // a multiple of 4
    uint32_t dtype;  // DType, 16 bits: of keys too
    uint32_t unused;
};

struct sh_encode_partial_keys {
    sh_partial_keys to;
    sh_new_keys source;
};

enum sh_speculation : uint32_t { sh_most_splits = 32 };

// How far each token of a row, or the best token of each block, is below the best one by speculated logits, as ranks; and how
// many of them each KV head wants. Items before the row's last one have a rank.
struct sh_speculate {
    sh_partial_keys partial;
    sh_step step;  // row_of is not looked at
    const void* query;  // [batch][KV head][group][head_dim]; may be a predicted one
    float* best;  // workspace [batch][KV head][splits][16]
    uint32_t* ranks;  // [batch][KV head][items]: larger ones for better items. items: max_blocks, of tokens 32 times as many
    uint32_t* wanted;  // [batch][KV head]: items less than alpha below the best
    float scale;
    float alpha;
    uint32_t group;
    uint32_t by_block;  // 1: items are blocks
    uint32_t splits;  // CTAs of a (batch entry, KV head), sh_most_splits at most
    uint32_t unused;
};

// Of each KV head its best items, as many as the row's KV heads want on average, and the row's last one; as lists of blocks
// with masks, in the order of the row. All KV heads of a row get the same number of tokens.
struct sh_choose_tokens {
    sh_step step;  // row_of is not looked at
    const uint32_t* ranks;  // of sh_speculate
    const uint32_t* wanted;
    uint32_t* chosen;  // workspace [batch][KV head][max_blocks]
    int32_t* pages;  // [batch][KV head][most_blocks]: the list
    int32_t* masks;  // likewise, bit t: token t of the block is chosen
    int32_t* offsets;  // likewise: chosen tokens of blocks before it
    int32_t* counts;  // [batch][KV head]: blocks of a list
    int32_t* tokens;  // [batch]: of each KV head, with the step's own one
    int32_t* places;  // [batch]: of the step's own token among staged ones of all entries, -1: nowhere
    uint64_t* counted;  // tokens of all lists, added up; or null
    uint32_t kv_heads;
    uint32_t by_block;
    uint32_t limit;  // items of a KV head, with the last one
    uint32_t most_blocks;  // at least `limit` or max_blocks, whichever is less
    uint32_t staged_blocks;  // of an entry; at least as many tokens as `limit` items have
    uint32_t unused;
};

// Listed tokens from the pool to staged blocks, one behind the other. Of each list all but the last one, which is the step's own.
struct sh_gather_tokens {
    const void* keys;  // a layer of the pool, as the device sees it: [page][KV head][32][head_dim]
    const void* values;
    void* staged_keys;  // [batch * staged_blocks][KV head][32][head_dim]
    void* staged_values;
    const int32_t* pages;  // of sh_choose_tokens, as the three below
    const int32_t* masks;
    const int32_t* offsets;
    const int32_t* counts;
    const int32_t* active_rows;
    uint64_t* refused;  // blocks that are not in the pool, or whose tokens find no place, added up; or null
    uint32_t batch;
    uint32_t kv_heads;
    uint32_t token_bytes;  // of the keys, and of the values of a KV head
    uint32_t pool_pages;
    uint32_t most_blocks;
    uint32_t staged_blocks;
    uint32_t ctas;
    uint32_t unused;
};
