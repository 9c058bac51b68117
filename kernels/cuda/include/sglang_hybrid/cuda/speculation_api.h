// C interface of the CUDA library for policy infinigen: partial keys, the choice of tokens by logits that are speculated from
// them, and copies of these tokens to device memory. Conventions as in c_api.h.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// Partial keys of a layer: the first columns of each key in a basis of its KV head.
struct sh_partial_keys {
    void* codes;  // [page][KV head][32][columns] of `dtype`
    const float* basis;  // [KV head][head_dim][columns]
    uint32_t pages;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t columns;  // a multiple of 4
    uint32_t dtype;  // DType of codes and of keys, 16 bits
    uint32_t unused;
};

// Compute the partial keys of new keys.
struct sh_encode_partial_keys {
    sh_partial_keys to;
    sh_new_keys source;
};

enum sh_speculation : uint32_t { sh_most_splits = 32 };

// Rank the items of a row, which are tokens or blocks, by speculated logits. A token's rank says how far its logit is below the
// best one, a block's rank is that of its best token. Count the items that each KV head wants. All items before the row's last
// one get a rank.
struct sh_speculate {
    sh_partial_keys partial;
    sh_step step;  // row_of is not read
    const void* query;  // [batch][KV head][group][head_dim]; may be a predicted one
    float* best;  // workspace [batch][KV head][splits][16]
    uint32_t* ranks;  // [batch][KV head][items]: larger ranks for better items. There are max_blocks items, or tokens 32 times
    // as many
    uint32_t* wanted;  // [batch][KV head]: number of items less than alpha below the best
    float scale;
    float alpha;
    uint32_t group;
    uint32_t by_block;  // 1: items are blocks, 0: tokens
    uint32_t splits;  // CTAs of a (batch entry, KV head), at most sh_most_splits
    uint32_t unused;
};

// Choose the best items of each KV head, as many as the row's KV heads want on average, and the row's last item. List them as
// blocks with masks, in the order of the row. All KV heads of a row get the same number of tokens.
struct sh_choose_tokens {
    sh_step step;  // row_of is not read
    const uint32_t* ranks;  // of sh_speculate
    const uint32_t* wanted;  // of sh_speculate
    uint32_t* chosen;  // workspace [batch][KV head][max_blocks]
    int32_t* pages;  // [batch][KV head][most_blocks]: the list
    int32_t* masks;  // [batch][KV head][most_blocks], bit t: token t of the block is chosen
    int32_t* offsets;  // [batch][KV head][most_blocks]: number of chosen tokens in the blocks before it
    int32_t* counts;  // [batch][KV head]: blocks of a list
    int32_t* tokens;  // [batch]: chosen tokens of each KV head, with the step's own token
    int32_t* places;  // [batch]: place of the step's own token among the staged tokens of all entries, -1: it has none
    uint64_t* counted;  // the number of tokens of all lists is added; or null
    uint32_t kv_heads;
    uint32_t by_block;
    uint32_t limit;  // most items of a KV head, with the last one
    uint32_t most_blocks;  // capacity of a list: at least `limit` or max_blocks, whichever is less
    uint32_t staged_blocks;  // of an entry; they hold at least as many tokens as `limit` items have
    uint32_t unused;
};

// Copy listed tokens from the pool to staged blocks, one token behind the other. The last token of each list is the step's own
// one, and is not copied.
struct sh_gather_tokens {
    const void* keys;  // a layer of the pool, at its device address: [page][KV head][32][head_dim]
    const void* values;  // as keys
    void* staged_keys;  // [batch * staged_blocks][KV head][32][head_dim]
    void* staged_values;  // as staged_keys
    const int32_t* pages;  // of sh_choose_tokens, like masks, offsets and counts
    const int32_t* masks;
    const int32_t* offsets;
    const int32_t* counts;
    const int32_t* active_rows;
    uint64_t* refused;  // the number of blocks that are not in the pool, or do not fit the staged blocks, is added; or null
    uint32_t batch;
    uint32_t kv_heads;
    uint32_t token_bytes;  // of a token's key, or of its value, of one KV head
    uint32_t pool_pages;
    uint32_t most_blocks;
    uint32_t staged_blocks;
    uint32_t ctas;
    uint32_t unused;
};
