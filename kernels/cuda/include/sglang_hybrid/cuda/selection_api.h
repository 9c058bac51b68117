// What the CUDA library offers for digests, scores and selection; conventions as in c_api.h.
//
// Which slot holds what. Slots [row][KV head][slots] of a layer; positions say which block of the row's sequence a slot
// holds, -1: none.
//   slot s < sink   block s and no other
//   all others      recent blocks, the tail and resident blocks, in any order: what a block is follows from its position
// slots = sink + recent + 1 + resident blocks. When a row opens a block, the new tail takes an empty slot or that of the
// resident with the lowest score. The block that is recent no more stays where it is and is resident from then on, so
// nothing is ever copied from slot to slot.
#pragma once

#include <cstdint>

// Digests and codes of one layer, for every page of the pool.
struct sh_digests {
    void* digests;            // [page][KV head][max, min][head_dim] of 16 bits; or compact, see compact.cuh; or null
    uint8_t* codes;  // [page][KV head][token][channels / 2], the first of two in the low bits; null without sketches
    const int64_t* channels;  // [KV head][channel_count]
    uint32_t pages;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t channel_count;  // 0 without sketches
    uint32_t dtype;  // DType of keys, and of queries, which digests have too
    uint32_t compact;  // whether digests are; needs sketches
};

struct sh_slot_table {
    int32_t* positions;  // [row][KV head][slots]
    uint32_t rows;
    uint32_t slots;
    uint32_t sink;
    uint32_t recent;
};

// The rows of a step. Lengths count the token that is being computed; its block is the tail.
struct sh_step {
    const int32_t* page_table;  // [batch][max_blocks]
    const int32_t* lengths;  // [batch]
    const int32_t* row_of;  // [batch]
    const int32_t* active_rows;
    uint32_t batch;
    uint32_t max_blocks;
};

// Rows that are in device memory as a whole: keys and values [page][KV head][32][head_dim] in every layer.
struct sh_dense_table {
    int32_t* pages;  // [row][max_blocks]: of each block of the row
    int32_t* held;  // [row]: how many blocks have one
    uint32_t rows;
    uint32_t max_blocks;
    uint32_t device_pages;
    uint32_t unused;
};

// -- keys --------------------------------------------------------------------------------------------------------------

// One token for each (batch entry, KV head): to the tail's slot and to the host pool; digest and codes of the tail.
struct sh_append {
    sh_digests digests;
    sh_slot_table table;  // positions are not looked at where `dense` has pages
    sh_dense_table dense;  // the tail is in a page of its row instead of a slot; no pages: it is not
    sh_step step;
    const void* keys;  // [batch][KV head][head_dim], entries key_stride values apart; null: only digests of what is there
    const void* values;  // likewise
    uint64_t key_stride;
    uint64_t value_stride;
    void* key_slots;  // [row][KV head][slots][32][head_dim]
    void* value_slots;
    void* pool_keys;  // a layer of the pool, as the device sees it: [page][KV head][32][head_dim]
    void* pool_values;
    const float* scores;  // of the last selection, as sh_select_blocks has them, or null: who gives up its slot
    uint64_t* refused;  // tokens whose page is not in the pool, added up; or null
    const void* query;    // [batch][KV head][group][head_dim], to be kept; or null
    void* kept_queries;   // [rows][KV head][group][head_dim]; or null
    int32_t* kept_lengths;  // [rows]: the length of the row whose query that is
    uint32_t group;
    uint32_t scores_by_row;
    uint32_t overlaps;  // what is read of launches in front is query, keys and values: this one begins before they are done
    uint32_t unused;
};

// Keys that are new in a layer, [count][KV head] blocks: of whole pages, or of the step's new tokens.
struct sh_new_keys {
    const void* keys;  // block i of head h begins at i * page_stride + h * head_stride, its tokens token_stride apart
    const int32_t* pages;  // [count], those that are not in the pool are left out; null: entry i of `step` has one new token
    const int32_t* filled;  // [count] tokens, with pages
    sh_step step;  // without pages; row_of is not looked at
    uint64_t page_stride;  // in values
    uint64_t head_stride;
    uint64_t token_stride;
    uint32_t count;
    uint32_t unused;
};

// Digests and codes of whole pages.
struct sh_digest_pages {
    sh_digests digests;
    sh_new_keys source;  // of pages, with at least one token each
};

// -- scores ------------------------------------------------------------------------------------------------------------

// Estimates of blocks by queries. sh_select_blocks makes scores of them.
struct sh_score_blocks {
    sh_digests digests;
    sh_step step;  // row_of is looked at with by_row only
    const void* query;  // [batch][KV head][group][head_dim]
    float* estimates;  // workspace [batch][KV head][group][max_blocks], in units of log2
    float* scores;  // [batch][KV head][max_blocks], -inf behind the row's end; with by_row [rows][..][..]
    const int32_t* only;  // [batch], or null: entries with 0 are left alone, by sh_select_blocks too
    float scale;
    float spread;  // without sketches
    uint32_t group;
    uint32_t by_row;  // how many rows have scores; 0: batch entries have them
    uint32_t query_by_row;  // with by_row: whether queries are [rows][KV head][group][head_dim]
    uint32_t unused;
};

// Scores that were put off are written, and then one for all KV heads of an entry: the logarithm of what theirs add up to.
struct sh_share_scores {
    sh_score_blocks scored;
};

// -- selection ---------------------------------------------------------------------------------------------------------

// Blocks that become resident: entry i of the list is block `positions[i]` of its row, in `pages[i]`, and goes to slot
// destinations[i] of [row][KV head][slots]. Positions are written to the slot table after the copies.
struct sh_plan {
    int32_t* pages;
    int32_t* destinations;
    int32_t* positions;
    int32_t* count;  // of entries
    uint32_t* progress;  // [2], 0 before and after a launch
    uint64_t capacity;
};

enum sh_select_total : uint32_t {  // blocks of all lists
    sh_total_misses = 0,  // also those that are gathered or dropped
    sh_total_recalled = 1,  // entries of the plan
    sh_total_gathered = 2,
    sh_total_selected = 3,  // with miss_counts: without blocks that are always in,
    sh_total_resident = 4,  // and those of them that had a slot before
    sh_select_totals = 5,
};

// Of the n misses of a (row, KV head) the best g are gathered and the others go to the first list:
//   g = floor(n * *gather_share + phase), phase in [0, 1) different from step to step, so that on average g / n is the share
// What is too much for the first list is gathered too, as far as there is room; of what is left then the worst are dropped.
//
// Gathered blocks get slots before the layer is attended and stay there: empty ones, then those of resident blocks that are
// not selected (with any_block: nor worth it), lowest score first. There may be fewer slots than g. The plan is made for
// slots that have them: it is carried out later, and overwrites none of their blocks that is selected.
struct sh_select_blocks {
    sh_slot_table table;
    sh_step step;
    sh_score_blocks scored;  // scores that were put off are written first; or nothing: estimates are null
    const float* scores;  // [batch][KV head][max_blocks]; with scores_by_row [rows][KV head][max_blocks]
    int32_t* miss_pages;  // [batch][KV head][most_misses], -1 behind the last; ascending positions
    int32_t* miss_positions;  // likewise
    int32_t* miss_counts;  // [batch][KV head]; null: nobody wants to know what is missed
    const float* gather_share;  // one number; or null: all misses are in the first list
    sh_plan gathered;  // with a share; room for batch x KV heads x most_gathered
    float* near_bias;  // [rows][KV head][group], or null: `near_bias` of the reference, of what is in slots or in a list then,
    // by the estimates of this step; stays as it is for entries that have none
    uint64_t* totals;  // [sh_select_totals], or null: what this launch finds is added
    const int32_t* due;  // [batch]: rows that recall whatever the interval says; or null
    const int32_t* interval;  // steps between recalls, one number; or null. 0: never
    const int32_t* first_lengths;  // [rows]: length in the row's first step, with `interval`
    int32_t* recalls;  // [batch], or null: who recalls is written here, for a launch that makes the plan later
    const int32_t* whole;  // [batch], or null: entries with 1 miss nothing, somebody attends to all of at least whole_score
    uint32_t* held;  // [batch][KV head][(max_blocks + 31) / 32], or null: of these entries, a bit for every block in a slot
    int32_t* attended;  // [row][KV head][slots], or null: the slot table without blocks that are not selected now
    sh_plan plan;  // not looked at without due and interval
    float bonus;  // of resident blocks
    float min_miss_score;  // a miss has at least this score
    uint32_t kv_heads;
    uint32_t budget;  // blocks
    uint32_t most_misses;
    uint32_t layer;  // layers recall at different steps
    uint32_t early;  // with `interval`: a row also recalls in so many of its first steps
    uint32_t pool_pages;
    uint32_t most_gathered;  // of one (row, KV head)
    uint32_t scores_by_row;
    uint32_t any_block;  // whether every block that is worth it is a miss, or those only that are selected
    float whole_score;
};

struct sh_apply_plan {
    sh_plan plan;
    int32_t* positions;  // the slot table's
    uint64_t slots;  // in the whole table
};

// -- after the worker's reply ------------------------------------------------------------------------------------------

// lse += `lse_shift` of the reference, for what was computed with the predicted query.
struct sh_shift_lse {
    sh_digests digests;
    const void* query;  // [batch][KV head][group][head_dim], real
    const void* query_ahead;  // predicted
    const int32_t* pages;  // [batch][KV head][most_misses]
    const int32_t* counts;  // [batch][KV head]
    const int32_t* active_rows;
    float* lse;  // [batch][KV head][group]
    float scale;
    uint32_t batch;
    uint32_t group;
    uint32_t most_misses;
};
