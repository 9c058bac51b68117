// C interface of the CUDA library for the beginning of the scout lane (prediction of queries) and the end of the main lane
// (attention over blocks in the host pool). Conventions as in c_api.h.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/selection_api.h"

// -- prediction --------------------------------------------------------------------------------------------------------

// x = hidden + residual, rounded. unit = x / root of its mean square, rounded; normed = unit * gain, rounded.
struct sh_unit_rms {
    const void* hidden;    // [batch][width] of `dtype`, rows hidden_stride apart
    const void* residual;  // [batch][width] of `dtype`, rows residual_stride apart; or null
    const void* gain;      // [width]; read only with `normed`
    void* unit;            // [batch][width]; or null
    void* normed;          // [batch][width]; or null
    const int32_t* active_rows;
    uint64_t hidden_stride;  // in values
    uint64_t residual_stride;
    float eps;
    uint32_t batch;
    uint32_t width;
    uint32_t dtype;  // DType, 16 bits
};

// Turn the output of a projection into queries: `finish` of scout/predictor.py.
struct sh_finish_queries {
    const void* projected;     // [batch][heads][head_dim] of `dtype`
    const void* addend;        // [batch][heads][head_dim] of `dtype`, added to `projected`; or null
    const float* bias;         // [heads][head_dim], added; or null
    const float* gain;         // [head_dim]: gain of the norm of every head; null: heads have no norm
    const void* rotary;        // [rotary_rows][rotary_dim], cosines then sines, float or `dtype`
    const int64_t* positions;  // [batch]: position of each entry's token in its sequence
    void* out;                 // [batch][heads][head_dim] of `dtype`
    const int32_t* active_rows;
    uint64_t rotary_rows;
    float eps;
    uint32_t batch;
    uint32_t heads;
    uint32_t head_dim;
    uint32_t rotary_dim;
    uint32_t rotary_dtype;  // DType: float or `dtype`
    uint32_t neox;          // 1: channel c is rotated with c + rotary_dim / 2; 0: 2c is rotated with 2c + 1
    uint32_t dtype;         // DType, 16 bits
};

// -- blocks that are read from the host pool ---------------------------------------------------------------------------

// Attention, with the real query, over blocks in the host pool. Two kinds of entries are computed:
//   entries that were not served   attend to their lists of full blocks, one for each KV head; merged with the local partial
//   whole entries                  attend to the blocks of their own row, served or not
// All other entries are neither read nor written.
struct sh_finish_late {
    const void* query;  // [batch][KV head][group][head_dim], the real one
    const void* keys;   // a layer of the pool, at its device address: [page][KV head][32][head_dim]
    const void* values;     // as keys
    sh_step step;           // row_of is read only with scores
    const int32_t* pages;   // [batch][KV head][most_blocks]; pages not in the pool are skipped; null: all entries are whole
    const int32_t* masks;   // [batch][KV head][most_blocks], bit t: token t of the block is attended; null: all tokens are
    const int32_t* counts;  // [batch][KV head], blocks of a list
    const int32_t* served;  // [batch]: 1 for entries that the worker served; null: no entry was served
    const int32_t* whole;   // [batch]: 1 for whole entries; null: no entry is whole, unless `pages` is null
    const float* scores;  // [rows][KV head][max_blocks]: whole entries attend to blocks of at least least_score, and to sink,
    // recent and tail blocks; null: to all blocks
    const float* bias;  // [rows][KV head][group], with scores, or null: added to the logits of sink, recent and tail blocks
    // [batch][KV head][(max_blocks + 31) / 32], or null: bits of the blocks of whole entries that `local` includes already
    const uint32_t* held;
    sh_side local;  // partial attention to merge with, unless an entry is whole and `held` is null; null: there is none
    void* out;  // [batch][KV head][group][head_dim] of the query's dtype
    // workspace, as for sh_attend_slots
    float* partial_out;
    float* partial_lse;
    uint32_t* arrived;
    float scale;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType of keys and values, and of the query
    uint32_t most_blocks;  // capacity of a list
    uint32_t pool_pages;
    uint32_t units;
    float least_score;
    uint32_t sink;  // number of blocks at a row's beginning that are always attended
    uint32_t recent;  // number of blocks before the tail that are always attended; the tail is, too
    uint32_t unused;
};
