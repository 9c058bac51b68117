// C interface of the CUDA library for policy hgca: moving averages of attention weights (MAW) of the tokens in slots, and masks
// of the salient tokens of blocks that have left their slots. Conventions as in c_api.h.
//
// The slots of a (row, KV head) are a ring, the window: block p of the row is in slot p % slots, and the newest blocks are in.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// Prepare window, masks and lists of each (batch entry, KV head) for a step, before the step's new token is in the cache:
//   rows that begin       load the window, evaluate its tokens and all before it by the query
//   rows that open a block  the oldest block leaves its slot, with a mask of its salient tokens
//   all                   list the blocks that have salient tokens
struct sh_contextual_sets {
    const void* query;  // [batch][KV head][group][head_dim]; read for rows that begin
    const void* pool_keys;  // a layer of the pool, at its device address: [page][KV head][32][head_dim]
    const void* pool_values;  // as pool_keys
    void* key_slots;  // [row][KV head][slots][32][head_dim]
    void* value_slots;  // as key_slots
    sh_slot_table table;  // the launch writes the positions of rows that begin, and of new tails
    sh_step step;
    const int32_t* begins;  // [batch], 1: the row has nothing in device memory and begins; null: all rows begin
    float* maw;  // [row][KV head][slots][32]
    int32_t* masks;  // [row][KV head][max_blocks], bit t: token t is salient; of blocks before the window
    int32_t* pages;  // [batch][KV head][most_blocks]: the list; null: no lists are written
    int32_t* list_masks;  // [batch][KV head][most_blocks], bit t: token t is salient
    int32_t* counts;  // [batch][KV head]: blocks of a list
    uint64_t* counted;  // the number of listed tokens is added; or null
    uint64_t* refused;  // the number of blocks that are not in the pool is added; or null
    float scale;
    float beta;  // a token is salient if its share of attention is above beta / tokens; 0: all tokens are salient
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType, 16 bits
    uint32_t pool_pages;
    uint32_t most_blocks;  // capacity of a list
};

// Update the MAW of all tokens in slots after a step: (1 - alpha) * MAW + alpha * the largest weight that a query head of the
// group gives to the token. The step's own token starts from an average of 0.
struct sh_move_averages {
    const void* query;  // [batch][KV head][group][head_dim]
    const void* keys;  // [row][KV head][slots][32][head_dim]
    const int32_t* positions;  // [row][KV head][slots]: position in its row of the block in a slot, -1: empty slot
    const int32_t* row_of;  // [batch]
    const int32_t* lengths;  // [rows]
    const int32_t* active_rows;
    const float* lse;  // [batch][KV head][group], natural logarithm, over all tokens in slots
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
