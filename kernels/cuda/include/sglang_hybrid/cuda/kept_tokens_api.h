// What the CUDA library offers for policy hcattention: codes of keys in device memory, attention weights by them, the tokens
// that are kept, and sums of their values. Conventions as in c_api.h.
//
// Weights of a step are [batch][KV head][group][max_blocks][32]: logits at first, then weights, 0 where a token is not kept.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// Codes of a layer's keys: indices of the nearest centroid of each part of a key, or the keys themselves.
struct sh_key_codes {
    void* codes;             // [page][KV head][32][code_bytes]
    const float* centroids;  // [KV head][books][count][head_dim / groups]; null: codes are keys
    uint32_t pages;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t dtype;  // DType of keys, 16 bits
    uint32_t code_bytes;
    uint32_t groups;  // parts of a key
    uint32_t books;   // codebooks of a KV head: one for each group, or one for all
    uint32_t count;   // centroids of a codebook
    uint32_t index_bytes;  // 1 or 2
    uint32_t unused;
};

struct sh_encode_keys {
    sh_key_codes to;
    sh_new_keys source;
};

// Logits of all tokens of each row, in units of log2, by codes. Tokens whose page is not in the pool have -inf, and what is
// behind a row's last token is not written.
struct sh_token_logits {
    sh_key_codes codes;
    sh_step step;       // row_of is not looked at
    const void* query;  // [batch][KV head][group][head_dim]
    float* weights;     // [batch][KV head][group][max_blocks][32]
    float scale;
    uint32_t group;
};

// From logits to weights of the fewest tokens of each query head that have `least` of its attention, and the blocks that have
// such tokens. Two launches: one for each query head, one for each KV head.
struct sh_keep_tokens {
    sh_step step;  // row_of is not looked at
    float* weights;
    int32_t* pages;      // [batch][KV head][max_blocks]: the list
    int32_t* positions;  // likewise: which block of the row
    int32_t* counts;     // [batch][KV head]
    uint64_t* counted;   // shares of tokens that query heads keep, in units of 2^-20, added up; or null
    float least;
    uint32_t renormalises;  // 1: weights of kept tokens add up to 1
    uint32_t kv_heads;
    uint32_t group;
    uint32_t pool_pages;
    uint32_t unused;
};

// Sums of values by weights, in the model's dtype: what the worker replied, and of entries that it did not serve the sums of
// listed blocks in the host pool.
struct sh_finish_sums {
    const void* values;  // a layer of the pool, as the device sees it: [page][KV head][32][head_dim]
    const float* weights;
    const int32_t* pages;      // [batch][KV head][max_blocks], those not in the pool are left out
    const int32_t* positions;  // likewise, those that are no block of `weights` are left out
    const int32_t* counts;     // [batch][KV head]
    const int32_t* served;     // [batch]; null: nobody was
    const float* replies;      // [batch][KV head][group][head_dim], of entries that are served
    void* out;                 // likewise, of `dtype`
    // workspace: [batch][KV head][splits][group][head_dim], and [batch][KV head] words that are 0 before and after a launch
    float* partial_out;
    uint32_t* arrived;
    const int32_t* active_rows;
    uint32_t batch;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType, 16 bits
    uint32_t max_blocks;
    uint32_t pool_pages;
    uint32_t splits;  // CTAs that share a list
};
