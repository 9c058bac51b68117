// What the CUDA library offers for policy hgca: moving averages of attention weights (MAW) of the tokens in slots, and masks of
// salient tokens that are in slots no more. Conventions as in c_api.h.
//
// The slots of a (row, KV head) are a ring: block p of the row is in slot p % slots, and the newest blocks are in.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// For each (batch entry, KV head), before its new token is there:
//   rows that begin       load the window, evaluate its tokens and all before it by the query
//   rows that open a block  the oldest block leaves its slot, with a mask of its salient tokens
//   all                   list the blocks that have salient tokens
struct sh_contextual_sets {
    const void* query;  // [batch][KV head][group][head_dim]; looked at for rows that begin
    const void* pool_keys;  // a layer of the pool, as the device sees it: [page][KV head][32][head_dim]
    const void* pool_values;
    void* key_slots;  // [row][KV head][slots][32][head_dim]
    void* value_slots;
    sh_slot_table table;  // positions of rows that begin, and of tails that open, are written here
    sh_step step;
    const int32_t* begins;  // [batch], 1: nothing of the row is in device memory; null: so it is with all of them
    float* maw;  // [row][KV head][slots][32]
    int32_t* masks;  // [row][KV head][max_blocks], bit t: token t is salient. Of blocks before the window
    int32_t* pages;  // [batch][KV head][most_blocks]: the list; null: none is wanted
    int32_t* list_masks;  // likewise
    int32_t* counts;  // [batch][KV head]
    uint64_t* counted;  // listed tokens, added up; or null
    uint64_t* refused;  // blocks that are not in the pool, added up; or null
    float scale;
    float beta;  // a token is salient whose share of attention is above beta / tokens; 0: all are
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType, 16 bits
    uint32_t pool_pages;
    uint32_t most_blocks;
};

// MAW of all tokens in slots after a step: (1 - alpha) * MAW + alpha * the largest weight of the group's query heads. A step's
// own token has an average of 0 before.
struct sh_move_averages {
    const void* query;  // [batch][KV head][group][head_dim]
    const void* keys;  // [row][KV head][slots][32][head_dim]
    const int32_t* positions;  // [row][KV head][slots]
    const int32_t* row_of;  // [batch]
    const int32_t* lengths;  // [rows]
    const int32_t* active_rows;
    const float* lse;  // [batch][KV head][group], natural logarithm, of all tokens in slots
    float* maw;  // [row][KV head][slots][32]
    float scale;
    float alpha;
    uint32_t rows;
    uint32_t batch;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType, 16 bits
    uint32_t slots;
    uint32_t unused;
};
