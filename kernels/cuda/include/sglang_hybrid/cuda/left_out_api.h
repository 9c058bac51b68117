// C interface of the CUDA library for what stands for the candidates that are not attended (left out). Conventions as in
// c_api.h; sinks, recent blocks and the tail are near blocks.
//
// Estimates tell how much attention the blocks left out would get: r times that of the attended candidates. The attended
// candidates' output stands for a part of it, and the mean of the row's values for the other part:
//   out = (near + (1 + (1 - s) r) attended + s r (mass of the attended) mean) / (the same sum of masses)
// with s = sh_select_blocks.mean_share. Divided by 1 + (1 - s) r this is a bias of near blocks, and a weight of the mean.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// Add the means of rows to attention outputs that have near_bias in them.
struct sh_left_out {
    const float* near_lse;  // [batch][KV head][group]: of near blocks, near_bias included; null: nothing is added
    const float* weights;   // [rows][KV head][group]: of the mean, by the attended candidates' mass
    const float* means;     // [rows][KV head][head_dim]
    const int32_t* row_of;  // [batch]
    uint32_t rows;
    uint32_t group;
};

// Compute the means of rows: of the values in up to sh_sampled_blocks blocks in the host pool, evenly spread over the row's
// candidates. 0 in a row without candidates.
struct sh_mean_values {
    sh_step step;
    const void* values;  // a layer of the pool, at its device address: [page][KV head][32][head_dim]
    const int32_t* only;  // [batch]: entries with 0 are skipped; null: none is
    float* means;  // [rows][KV head][head_dim]
    uint32_t rows;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t dtype;  // DType of values and of the model
    uint32_t pool_pages;
    uint32_t sink;  // number of sink blocks
    uint32_t recent;  // number of recent blocks
    uint32_t unused;
};

enum sh_sampling : uint32_t {
    sh_sampled_blocks = 32,
    sh_sampled_again = 512,  // a row that decodes gets another mean behind this number of tokens, and each time it has doubled
};

// Compute near_lse: that of near blocks in slots. Rows that `mean.only` names, or that get another mean (sh_sampled_again), also get
// their mean.
struct sh_near_lse {
    const void* query;  // [batch][KV head][group][head_dim]
    const void* keys;  // [row][KV head][slots][32][head_dim], or codes with `steps`
    const float* steps;  // as for sh_attend_slots
    const uint16_t* factors;
    const float* near_bias;  // [rows][KV head][group]
    float* near_lse;  // [batch][KV head][group]; -inf without near blocks
    sh_slot_table table;
    sh_mean_values mean;  // has the step
    float scale;
    uint32_t group;
};
