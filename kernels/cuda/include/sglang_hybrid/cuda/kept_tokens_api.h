// C interface of the CUDA library for policy hcattention: codes of keys in device memory, attention weights that are computed
// from codes, lists of the tokens that are kept, and weighted sums of their values. Conventions as in c_api.h.
//
// The weights of a step are [batch][KV head][group][max_blocks][32]. The buffer holds logits at first, then weights, with 0
// where a token is not kept.
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
    uint32_t books;   // codebooks of a KV head: one for each part, or one for all parts
    uint32_t count;   // centroids of a codebook
    uint32_t index_bytes;  // bytes of a centroid's index: 1 or 2
    uint32_t unused;
};

// Compute the codes of new keys.
struct sh_encode_keys {
    sh_key_codes to;
    sh_new_keys source;
};

// Compute the logits of all tokens of each row from their codes, in units of log2. Tokens whose page is not in the pool get
// -inf. Elements behind a row's last token are not written.
struct sh_token_logits {
    sh_key_codes codes;
    sh_step step;       // row_of is not read
    const void* query;  // [batch][KV head][group][head_dim]
    float* weights;     // [batch][KV head][group][max_blocks][32]: gets the logits
    float scale;
    uint32_t group;
};

// Turn logits into weights of the fewest tokens of each query head that have share `least` of its attention, and list the
// blocks that have such tokens. The launcher launches two kernels: a CTA for each query head, then a CTA for each KV head.
struct sh_keep_tokens {
    sh_step step;  // row_of is not read
    float* weights;      // [batch][KV head][group][max_blocks][32]
    int32_t* pages;      // [batch][KV head][max_blocks]: the list
    int32_t* positions;  // [batch][KV head][max_blocks]: position of each listed block in its row
    int32_t* counts;     // [batch][KV head]: blocks of a list
    uint64_t* counted;   // the share of the row's tokens that each query head keeps is added, in units of 2^-20; or null
    float least;
    uint32_t renormalises;  // 1: weights of kept tokens add up to 1
    uint32_t kv_heads;
    uint32_t group;
    uint32_t pool_pages;
    uint32_t unused;
};

// Write sums of values by weights, in the model's dtype: the worker's replies, and for entries that the worker did not serve
// the sums over listed blocks, read from the host pool.
struct sh_finish_sums {
    const void* values;  // a layer of the pool, at its device address: [page][KV head][32][head_dim]
    const float* weights;      // [batch][KV head][group][max_blocks][32]
    const int32_t* pages;      // [batch][KV head][max_blocks]; pages that are not in the pool are skipped
    const int32_t* positions;  // [batch][KV head][max_blocks]; blocks at positions beyond `weights` are skipped
    const int32_t* counts;     // [batch][KV head]: blocks of a list
    const int32_t* served;     // [batch]: 1 for entries that the worker served; null: no entry was served
    const float* replies;      // [batch][KV head][group][head_dim], of entries that are served
    void* out;                 // [batch][KV head][group][head_dim] of `dtype`
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
