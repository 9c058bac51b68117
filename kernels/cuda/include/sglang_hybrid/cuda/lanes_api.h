// What the CUDA library offers for the beginning of the scout lane and the end of the main lane; conventions as in c_api.h.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/selection_api.h"

// -- prediction --------------------------------------------------------------------------------------------------------

// x = hidden + residual, rounded. unit = x / root of its mean square, rounded; normed = unit * gain, rounded.
struct sh_unit_rms {
    const void* hidden;    // [batch][width] of `dtype`, rows hidden_stride apart
    const void* residual;  // likewise; or null
    const void* gain;      // [width]; not looked at without `normed`
    void* unit;            // [batch][width]; or null
    void* normed;          // likewise
    const int32_t* active_rows;
    uint64_t hidden_stride;  // in values
    uint64_t residual_stride;
    float eps;
    uint32_t batch;
    uint32_t width;
    uint32_t dtype;  // DType, 16 bits
};

// From a projection to queries: `finish` of scout/predictor.py.
struct sh_finish_queries {
    const void* projected;     // [batch][heads][head_dim] of `dtype`
    const void* addend;        // likewise, added; or null
    const float* bias;         // [heads][head_dim], added; or null
    const float* gain;         // [head_dim] of the norm of every head; or null: there is none
    const void* rotary;        // [rotary_rows][rotary_dim], cosines then sines, float or `dtype`
    const int64_t* positions;  // [batch]
    void* out;                 // [batch][heads][head_dim] of `dtype`
    const int32_t* active_rows;
    uint64_t rotary_rows;
    float eps;
    uint32_t batch;
    uint32_t heads;
    uint32_t head_dim;
    uint32_t rotary_dim;
    uint32_t rotary_dtype;  // DType: float or `dtype`
    uint32_t neox;          // 1: channel c turns against c + rotary_dim / 2; 0: 2c against 2c + 1
    uint32_t dtype;         // DType, 16 bits
};

// -- blocks that are read from the host pool ---------------------------------------------------------------------------

// Attention of entries that were not served over lists of full blocks in the host pool, one for each KV head, merged with the
// local partial; and of entries that attend to the blocks of their row, served or not. All others are neither read nor written.
struct sh_finish_late {
    const void* query;  // [batch][KV head][group][head_dim], the real one
    const void* keys;   // a layer of the pool, as the device sees it: [page][KV head][32][head_dim]
    const void* values;
    sh_step step;           // row_of is not looked at without scores
    const int32_t* pages;   // [batch][KV head][most_blocks], those not in the pool are left out; null: all entries are whole
    const int32_t* masks;   // like pages, bit t: token t of the block counts; null: all of them do
    const int32_t* counts;  // [batch][KV head], blocks of a list
    const int32_t* served;  // [batch]; null: nobody was
    const int32_t* whole;   // [batch], 1: attends to the blocks of its row; null: nobody does
    const float* scores;    // [rows][KV head][max_blocks]: blocks of whole entries that count, by least_score; null: all do
    const float* bias;  // [rows][KV head][group], with scores, or null: added to the logits of blocks that are always in
    const uint32_t*
        held;  // [batch][KV head][(max_blocks + 31) / 32], or null: blocks of whole entries that `local` has already
    sh_side local;  // null: there is none
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
    uint32_t most_blocks;
    uint32_t pool_pages;
    uint32_t units;
    float least_score;
    uint32_t sink;  // blocks that are always in: these,
    uint32_t recent;  // as many before the tail, and the tail
    uint32_t unused;
};
