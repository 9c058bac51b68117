// What the CUDA library offers for the beginning of a step, and for steps in which all rows are in device memory as a
// whole; conventions as in c_api.h.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// -- the beginning of a step -------------------------------------------------------------------------------------------

enum sh_first_length : int32_t {  // instead of a row's first length, before its first step
    sh_row_arrived = -1,          // nothing of it is resident
    sh_row_prefilled = -2,        // its resident blocks were chosen when its prompt was computed
    sh_row_let_go = -3,           // nothing of it is resident any more, but its first step was earlier
};

// From SGLang's tables to what the kernels of a step read. Entries from `active` on are padding.
struct sh_begin_step {
    const int32_t* req_to_token;  // [rows][row_tokens]: where the row's tokens are in the pool
    const void* rows;             // [batch] int64 or int32
    const void* lengths;          // likewise
    int32_t* page_table;          // [batch][max_blocks]; entries behind a row's end keep what they have
    int32_t* step_lengths;        // [batch]
    int32_t* row_of;              // [batch]
    int32_t* begins;              // [batch]: 1 for rows that have nothing resident
    int32_t* whole;               // [batch]: 1 for rows of more than whole_beyond tokens in their first whole_steps steps
    int32_t* active_rows;         // one number
    int32_t* lengths_by_row;      // [rows]
    int32_t* first_lengths;       // [rows]
    uint32_t row_tokens;
    uint32_t rows_known;
    uint32_t batch;
    uint32_t max_blocks;
    uint32_t active;
    uint32_t wide;  // whether rows and lengths have 64 bits
    uint32_t whole_beyond;
    uint32_t whole_steps;
};

// -- rows that are held as a whole -------------------------------------------------------------------------------------

// Before a step: rows that are not in it give their pages back, those that are in it get what they lack. What of that the
// host pool has is listed: entry i is page load_pages[i] there, for block load_destinations[i] of [page][KV head] here.
struct sh_hold_rows {
    sh_dense_table table;
    sh_step step;
    int32_t* renewed;     // [rows]: 1 where what the row holds is of another request; 0 after the launch
    int32_t* free_pages;  // [device_pages], of which the first *free_count are free
    int32_t* free_count;
    int32_t* load_pages;         // [capacity]
    int32_t* load_destinations;  // [capacity]
    int32_t* load_count;
    uint64_t* refused;  // rows that find no pages, added up; or null
    uint32_t capacity;
    uint32_t kv_heads;
};

// When whole rows are held no longer: rows of the step whose query of the token before was kept go on as they are. All others
// have nothing resident: of those that decoded before, the first steps are over.
struct sh_let_rows_go {
    sh_step step;                   // its page table is not looked at
    const int32_t* kept_lengths;    // [rows], see sh_append; or null: no row goes on
    const int32_t* lengths_by_row;  // [rows]
    int32_t* first_lengths;         // [rows]
    int32_t* goes_on;               // [batch], with kept_lengths: 1 for entries that go on
    uint32_t rows;
    uint32_t unused;
};

// Blocks of a plan that are in pages of rows that are held, to a staging; or from there to their slots. Pages and slots are
// the same memory: block (page p, KV head h) is p * kv_heads + h of it, slot s of (row r, KV head h) is
// (r * kv_heads + h) * slots + s. Entry i of the plan is block i of the staging, and its page is -1 from then on.
struct sh_move_held {
    sh_plan plan;
    sh_dense_table table;
    const int32_t* renewed;  // [rows], as for sh_hold_rows
    void* keys;              // a layer: [device_pages * kv_heads] blocks
    void* values;
    void* staged_keys;  // [staged_blocks] blocks
    void* staged_values;
    uint32_t staged_blocks;
    uint32_t kv_heads;
    uint32_t slots;
    uint32_t block_bytes;  // of keys or values; a multiple of 16
    uint32_t ctas;
    uint32_t to_slots;  // 1: from the staging to slots, 0: from pages to the staging
};

// One token for each (batch entry, KV head) over all blocks of its row.
struct sh_attend_pages {
    const void* query;   // [batch][KV head][group][head_dim]
    const void* keys;    // a layer: [page][KV head][32][head_dim]
    const void* values;  // likewise
    sh_dense_table table;
    sh_step step;  // its page table is not looked at
    void* out;     // [batch][KV head][group][head_dim] of the query's dtype; 0 where no token counts
    // workspace, as for sh_attend_slots
    float* partial_out;
    float* partial_lse;
    uint32_t* arrived;
    float scale;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType of keys and values, and of the query
    uint32_t units;
    uint32_t overlaps;  // the launch in front is sh_append, which overlaps too: this one begins before it is done
    uint32_t unused;
};
