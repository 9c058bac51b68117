// C interface of the CUDA library for digests, scores and selection. Conventions as in c_api.h.
//
// Which slot holds which block. A layer has slots [row][KV head][slots]; `positions` has for each slot the position of its
// block in the row's sequence, -1: empty slot.
//   slot s < sink   block s and no other
//   all others      recent blocks, the tail and resident blocks, in any order: the kind of a block follows from its position
// slots = sink + recent + 1 + resident blocks. When a row opens a block, the new tail takes an empty slot, or the slot of the
// resident block with the lowest score. The block that stops being recent keeps its slot and becomes resident, so no block is
// ever copied from slot to slot.
//
// Sink blocks, recent blocks and the tail are always attended. All other blocks of a row are the candidates of selection.
#pragma once

#include <cstdint>

// Digests and sketch codes of one layer, for every page of the pool.
struct sh_digests {
    void* digests;  // [page][KV head][max, min][head_dim] of 16 bits; or compact, see compact.cuh; or null
    uint8_t* codes;  // [page][KV head][token][channels / 2], the first of two channels in the low bits; null without sketches
    const int64_t* channels;  // [KV head][channel_count]: channels of the sketch
    uint32_t pages;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t channel_count;  // 0 without sketches
    uint32_t dtype;  // DType of keys and of queries; digests that are not compact have the dtype of queries
    uint32_t compact;  // 1: digests are compact, which needs sketches
};

// Which block each slot of a layer holds.
struct sh_slot_table {
    int32_t* positions;  // [row][KV head][slots]
    uint32_t rows;
    uint32_t slots;
    uint32_t sink;  // number of sink blocks
    uint32_t recent;  // number of recent blocks
};

// The rows of a step. Lengths count the token that is being computed; its block is the tail.
struct sh_step {
    const int32_t* page_table;  // [batch][max_blocks]: page of each block of a row
    const int32_t* lengths;  // [batch]: tokens
    const int32_t* row_of;  // [batch]: row of each entry
    const int32_t* active_rows;
    uint32_t batch;
    uint32_t max_blocks;
};

// Rows that are in device memory as a whole: keys and values are pages [page][KV head][32][head_dim] in every layer.
struct sh_dense_table {
    int32_t* pages;  // [row][max_blocks]: device page of each block of the row
    int32_t* held;  // [row]: number of blocks that have a page, from the row's beginning
    uint32_t rows;
    uint32_t max_blocks;
    uint32_t device_pages;  // number of pages in device memory
    uint32_t unused;
};

// -- keys --------------------------------------------------------------------------------------------------------------

// Store one token of each (batch entry, KV head) in the tail's slot and in the host pool, and update digest and codes of the
// tail.
struct sh_append {
    sh_digests digests;
    sh_slot_table table;  // positions are not read if `dense` has pages
    sh_dense_table dense;  // with pages: the tail is in a page of its row instead of a slot; null pages: it is in a slot
    sh_step step;
    const void* keys;  // [batch][KV head][head_dim], entries key_stride values apart; null: there are no new tokens, only
    // digests and codes of what the pool has
    const void* values;  // [batch][KV head][head_dim], entries value_stride values apart
    uint64_t key_stride;
    uint64_t value_stride;
    void* key_slots;  // [row][KV head][slots][32][head_dim]
    void* value_slots;  // as key_slots
    const float* steps;  // as for sh_attend_slots. Given: slots are codes, and digests of a tail with a slot are computed from
    // what the codes stand for; not with `dense`
    uint16_t* factors;  // [row][KV head][slots][2][32], with steps
    void* pool_keys;  // a layer of the pool, at its device address: [page][KV head][32][head_dim]
    void* pool_values;  // as pool_keys
    const float* scores;  // of the last selection, as for sh_select_blocks: they decide which resident block gives up its slot
    // to a new tail; null: any resident block does
    uint64_t* refused;  // the number of tokens whose page is not in the pool is added; or null
    const void* query;  // [batch][KV head][group][head_dim], is copied to kept_queries; or null
    void* kept_queries;  // [rows][KV head][group][head_dim]; or null
    int32_t* kept_lengths;  // [rows]: length of the row in the step of its kept query
    uint32_t group;
    uint32_t scores_by_row;  // 1: scores are [rows][KV head][max_blocks], 0: [batch][KV head][max_blocks]
    uint32_t overlaps;  // 1: this launch begins before the launches in front of it are done. Of what it reads, these may write
    // query, keys and values only
    uint32_t unused;
};

// New keys of a layer, [count][KV head] blocks: the keys of whole pages, or of the step's new tokens.
struct sh_new_keys {
    const void* keys;  // block i of head h begins at i * page_stride + h * head_stride, its tokens token_stride apart
    const int32_t* pages;  // [count], those not in the pool are skipped; null: entry i of `step` has one new token
    const int32_t* filled;  // [count]: tokens of each page, with pages
    sh_step step;  // read only without pages; row_of is not read
    uint64_t page_stride;  // in values
    uint64_t head_stride;
    uint64_t token_stride;
    uint32_t count;
    uint32_t unused;
};

// Compute digests and codes of whole pages.
struct sh_digest_pages {
    sh_digests digests;
    sh_new_keys source;  // with pages, of at least one token each
};

// -- scores ------------------------------------------------------------------------------------------------------------

// Estimate the attention of queries to all blocks of their rows. sh_select_blocks turns these estimates into scores.
struct sh_score_blocks {
    sh_digests digests;
    sh_step step;  // row_of is read only with by_row
    const void* query;  // [batch][KV head][group][head_dim]
    float* estimates;  // workspace [batch][KV head][group][max_blocks], in units of log2
    float* scores;  // [batch][KV head][max_blocks], -inf behind the row's end; with by_row [rows][KV head][max_blocks]
    const int32_t* only;  // [batch], or null: entries with 0 are skipped, by sh_select_blocks too
    float scale;
    float spread;  // as for `digest_logits` of the reference; used without sketches
    uint32_t group;
    uint32_t by_row;  // number of rows that have scores; 0: batch entries have scores, not rows
    uint32_t query_by_row;  // with by_row, 1: queries are [rows][KV head][group][head_dim]
    uint32_t unused;
};

// Write the scores of pending estimates, then give all KV heads of an entry one common score for each block: the logarithm of
// the sum of their shares.
struct sh_share_scores {
    sh_score_blocks scored;
};

// -- selection ---------------------------------------------------------------------------------------------------------

// A list of blocks that become resident: entry i is block `positions[i]` of its row, is in page `pages[i]`, and goes to slot
// destinations[i] of [row][KV head][slots]. The slot table gets the positions after the copies (sh_apply_plan).
struct sh_plan {
    int32_t* pages;
    int32_t* destinations;
    int32_t* positions;
    int32_t* count;  // number of entries
    uint32_t* progress;  // [2], 0 before and after a launch
    uint64_t capacity;
};

enum sh_select_total : uint32_t {  // what sh_select_blocks.totals counts: blocks of all (batch entry, KV head) pairs
    sh_total_misses = 0,  // with those that are gathered or dropped
    sh_total_recalled = 1,  // entries of the plan
    sh_total_gathered = 2,
    sh_total_selected = 3,  // counted with miss_counts: selected candidates,
    sh_total_resident = 4,  // and those of them that had a slot before
    sh_total_gather_ns = 5,  // not a selection's: see sh_gather_blocks.taken_ns
    sh_select_totals = 6,
};

// Select the blocks of each (row, KV head), and split them by residency: blocks without a slot are misses.
//
// Of the n misses of a (row, KV head) the best g are gathered and the others go to the first list, miss_pages:
//   g = floor(n * *gather_share + phase), phase in [0, 1) different from step to step, so that on average g / n is the share
// Misses that do not fit the first list are gathered too, up to most_gathered. Of the misses that then remain the worst are
// dropped.
//
// Gathered blocks get slots before the layer is attended and stay there: empty slots first, then those of resident blocks that
// are not selected (with any_block: and have a score below min_miss_score), lowest score first. If there are fewer such slots
// than g, fewer blocks are gathered. `plan` is made for slots that have the gathered blocks: it is carried out later, and
// overwrites no gathered block that is selected.
struct sh_select_blocks {
    sh_slot_table table;
    sh_step step;
    sh_score_blocks scored;  // pending estimates, whose scores are written first; null estimates: scores are written already
    const float* scores;  // [batch][KV head][max_blocks]; with scores_by_row [rows][KV head][max_blocks]
    int32_t* miss_pages;  // [batch][KV head][most_misses], -1 behind the last; ascending positions
    int32_t* miss_positions;  // [batch][KV head][most_misses], -1 behind the last; ascending
    int32_t* miss_counts;  // [batch][KV head]; null: misses are not listed
    const float* gather_share;  // one number; or null: all misses are in the first list
    sh_plan gathered;  // with a share: gets the gathered blocks; capacity is at least batch x KV heads x most_gathered
    float* near_bias;  // [rows][KV head][group], or null: gets `near_bias` of the reference, by the estimates of this step.
    // Attended are the blocks that are then in slots or in a list. Entries without scores in this step keep their bias
    uint64_t* totals;  // [sh_select_totals], or null: the counts of this launch are added
    const int32_t* due;  // [batch]: 1 for rows that recall whatever the interval says; or null
    const int32_t* interval;  // steps between recalls, one number; or null. 0: never
    const int32_t* first_lengths;  // [rows]: length in the row's first step, with `interval`
    int32_t* recalls;  // [batch], or null: gets 1 for rows that recall, 0 for others, for a launch that makes the plan later
    const int32_t* whole;  // [batch], or null: entries with 1 have no misses, since sh_finish_late attends to all of their
    // blocks that score at least whole_score
    uint32_t* held;  // [batch][KV head][(max_blocks + 31) / 32], or null: gets a bit for each block of a whole entry in a slot
    int32_t* attended;  // [row][KV head][slots], or null: gets the slot table with -1 for blocks that are not selected now
    sh_plan plan;  // gets what recalls make resident; not used without due and interval
    float bonus;  // is added to the scores of resident blocks for the selection
    float min_miss_score;  // a miss has at least this score
    uint32_t kv_heads;
    uint32_t budget;  // in blocks
    uint32_t most_misses;  // capacity of a list of misses
    uint32_t layer;  // makes layers recall at different steps
    uint32_t early;  // with `interval`: a row also recalls in this number of its first steps
    uint32_t pool_pages;
    uint32_t most_gathered;  // of one (row, KV head)
    uint32_t scores_by_row;
    uint32_t any_block;  // 1: every block without a slot that scores at least min_miss_score is a miss, 0: only if selected
    float whole_score;
};

// Write the positions of a plan's blocks to the slot table, once the blocks are copied.
struct sh_apply_plan {
    sh_plan plan;
    int32_t* positions;  // of the slot table
    uint64_t slots;  // number of slots in the whole table
};

// -- after the worker's reply ------------------------------------------------------------------------------------------

// Correct LSEs that were computed with a predicted query: add `lse_shift` of the reference.
struct sh_shift_lse {
    sh_digests digests;
    const void* query;  // [batch][KV head][group][head_dim], the real query
    const void* query_ahead;  // [batch][KV head][group][head_dim], the predicted query
    const int32_t* pages;  // [batch][KV head][most_misses]: blocks that the LSE is over
    const int32_t* counts;  // [batch][KV head]: blocks of a list
    const int32_t* active_rows;
    float* lse;  // [batch][KV head][group]
    float scale;
    uint32_t batch;
    uint32_t group;
    uint32_t most_misses;
};
