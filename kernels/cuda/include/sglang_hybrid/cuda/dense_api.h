// C interface of the CUDA library for the beginning of a step, and for steps in which all rows are in device memory as a
// whole ("whole requests"). Conventions as in c_api.h.
#pragma once

#include <cstdint>

#include "sglang_hybrid/cuda/selection_api.h"

// -- the beginning of a step -------------------------------------------------------------------------------------------

enum sh_first_length : int32_t {  // what first_lengths has of a row before the row's first step
    sh_row_arrived = -1,          // no block of the row is resident
    sh_row_prefilled = -2,        // the row's resident blocks were chosen when its prompt was computed
    sh_row_let_go = -3,           // no block of the row is resident any more, but its first step was earlier
};

// Convert SGLang's tables to the arrays that the kernels of a step read. Entries from `active` on are padding.
struct sh_begin_step {
    const int32_t* req_to_token;  // [rows][row_tokens]: index of each of the row's tokens in the pool
    const void* rows;             // [batch] int64 or int32: row of each entry
    const void* lengths;          // [batch] of the dtype of `rows`: tokens of each entry's row
    int32_t* page_table;          // [batch][max_blocks]; elements behind a row's end are not written
    int32_t* step_lengths;        // [batch]: `lengths`, or 0 for rows and lengths out of bounds
    int32_t* row_of;              // [batch]: `rows`, or -1 for rows and lengths out of bounds
    int32_t* begins;              // [batch]: 1 for rows that have no resident block
    int32_t* whole;               // [batch]: 1 for rows of more than whole_beyond tokens in their first whole_steps steps
    int32_t* active_rows;         // one number, gets `active`
    int32_t* lengths_by_row;      // [rows]: gets the length of each active row
    int32_t* first_lengths;       // [rows]: gets the length in a row's first step, where it has an sh_first_length
    uint32_t row_tokens;
    uint32_t rows_known;          // number of rows of the arrays [rows]
    uint32_t batch;
    uint32_t max_blocks;
    uint32_t active;              // number of real entries
    uint32_t wide;  // 1: rows and lengths are int64, 0: int32
    uint32_t whole_beyond;
    uint32_t whole_steps;
};

// -- rows that are held as a whole -------------------------------------------------------------------------------------

// Give device pages to all blocks of the rows of a step, before the step: rows that are not in the step give their pages back,
// rows in the step get the pages that they lack. Blocks that must then be loaded from the host pool are listed: entry i of the
// list loads page load_pages[i] of the pool to block load_destinations[i] of [page][KV head] in device memory.
struct sh_hold_rows {
    sh_dense_table table;
    sh_step step;
    int32_t* renewed;     // [rows]: 1 where the row's pages hold another request's blocks; 0 after the launch
    int32_t* free_pages;  // [device_pages], of which the first *free_count are free
    int32_t* free_count;
    int32_t* load_pages;         // [capacity]
    int32_t* load_destinations;  // [capacity]
    int32_t* load_count;         // entries of the list
    uint64_t* refused;  // the number of rows that get no pages is added; or null
    uint32_t capacity;
    uint32_t kv_heads;
};

// Mark rows when whole rows are no longer held. Rows of the step whose query of the token before was kept continue as they are.
// All other rows have no resident block: of those that decoded before, the first steps are over.
struct sh_let_rows_go {
    sh_step step;                   // its page table is not read
    const int32_t* kept_lengths;    // [rows], see sh_append; or null: no row continues
    const int32_t* lengths_by_row;  // [rows], of sh_begin_step
    int32_t* first_lengths;         // [rows], of sh_begin_step
    int32_t* goes_on;               // [batch], with kept_lengths: gets 1 for entries whose row continues, 0 for others
    uint32_t rows;
    uint32_t unused;
};

// Move blocks of a plan from the pages of held rows to the staging; or from the staging to their slots. Pages and slots are the
// same memory: block (page p, KV head h) is block p * kv_heads + h of it, slot s of (row r, KV head h) is block
// (r * kv_heads + h) * slots + s. Entry i of the plan is staged in block i of the staging, and has page -1 from then on. Blocks
// of codes have half as many bytes as pages and staged blocks.
struct sh_move_held {
    sh_plan plan;
    sh_dense_table table;
    const int32_t* renewed;  // [rows], as for sh_hold_rows
    void* keys;              // a layer: [device_pages * kv_heads] blocks
    void* values;            // as keys
    void* staged_keys;       // [staged_blocks] blocks
    void* staged_values;     // as staged_keys
    const float* steps;      // as for sh_attend_slots. Given: slots are codes of numbers of `dtype`
    uint16_t* factors;       // [row][KV head][slots][2][32], with steps
    uint64_t slot_blocks;    // blocks of all slots
    uint32_t staged_blocks;
    uint32_t kv_heads;
    uint32_t slots;
    uint32_t block_bytes;  // of a page's keys, or of its values; a multiple of 16
    uint32_t ctas;
    uint32_t to_slots;  // 1: from the staging to slots, 0: from pages to the staging
    uint32_t dtype;     // DType of pages, with steps
    uint32_t unused;
};

// Attention of one token for each (batch entry, KV head) over all blocks of its row.
struct sh_attend_pages {
    const void* query;   // [batch][KV head][group][head_dim]
    const void* keys;    // a layer: [page][KV head][32][head_dim]
    const void* values;  // as keys
    sh_dense_table table;
    sh_step step;  // its page table is not read
    void* out;     // [batch][KV head][group][head_dim] of the query's dtype; 0 where there is no token to attend to
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
    uint32_t overlaps;  // 1: the launch before is an sh_append that overlaps, too; this launch begins before that one is done
    uint32_t unused;
};
