// C interface of the CUDA library, for callers in other languages. Each launcher takes one struct of device pointers and
// sizes, which it passes to the kernel unchanged, and a stream; it returns a cudaError_t. Launchers allocate nothing and wait
// for nothing, so all of them can be captured in a CUDA graph.
//
// Static shapes: a launch covers `batch` entries, one for each row (running request) of the step. `active_rows` points to the
// number of real entries, in device memory (null: all entries are real). Kernels neither read nor write the entries behind
// these. Arrays [rows] are indexed by row, whatever batch entry the row has.
//
// A block is 32 tokens of one layer and one KV head. Fields that many structs have:
//   batch, rows     batch entries of the launch; rows that the arrays [rows] have
//   kv_heads, group, head_dim   KV heads of this rank; query heads per KV head; channels of a head
//   scale           factor of q . k: logits are scale * (q . k)
//   max_blocks      most blocks of a row
//   pool_pages      pages of a layer in the host pool; page numbers from this on are out of bounds
//   ctas            CTAs that the launcher launches, at most
#pragma once

#include <cstdint>

#include "sglang_hybrid/mailbox.h"

// -- attention over slots ----------------------------------------------------------------------------------------------

// Attention of one token for each (batch entry, KV head) over the blocks in the slots of its row. Of a block at position p the
// first min(32, length - 32 p) tokens are attended.
struct sh_attend_slots {
    const void* query;  // [batch][KV head][group][head_dim]
    const void* keys;   // [row][KV head][slots][32][head_dim]
    const void* values;  // as keys
    const int32_t* positions;  // [row][KV head][slots]: position in its row's sequence of the block in a slot, -1: empty slot
    const int32_t* row_of;  // [batch]: row of each entry; a row that does not exist counts as one without tokens
    const int32_t* lengths;  // [rows]: tokens
    const int32_t* active_rows;
    const float* near_bias;  // [rows][KV head][group], or null: added to the logits of sink, recent and tail blocks. Weights
    // and LSE include the bias
    const float* steps;  // [4][KV head][head_dim], or null. Given: keys and values are codes of one byte (slot_codes.cuh), and
    // `dtype` is the query's; steps of keys, those of values, reciprocals of both
    const uint16_t* factors;  // [row][KV head][slots][2][32] float16, with steps: of the tokens' keys, and of their values
    float* out;  // [batch][KV head][group][head_dim]; 0 where there is no token to attend to
    float* lse;  // [batch][KV head][group], natural logarithm
    // Workspace: memory for `units` partial results, and [batch][KV head] words that are 0 before and after a launch.
    float* partial_out;  // [units][group][head_dim]
    float* partial_lse;  // [units][group]
    uint32_t* arrived;
    float scale;
    uint32_t rows;
    uint32_t batch;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType of keys and values, and of the query
    uint32_t units;  // from sh_cuda_attend_units; with fewer units the launch does not use the whole device
    uint32_t slots;
    uint32_t sink;  // number of blocks at a row's beginning that get near_bias
    uint32_t recent;  // number of blocks before the tail that get near_bias; the tail gets it too
    uint32_t unused;
};

// -- merging -----------------------------------------------------------------------------------------------------------

// A partial attention.
struct sh_side {
    const float* out;  // [batch][heads][head_dim]
    const float* lse;  // [batch][heads]; -inf: the side is empty, and `out` may be anything
};

// Merge two partial attentions, as `merge` of the reference does.
struct sh_merge {
    sh_side first;
    sh_side second;
    void* out;  // [batch][heads][head_dim] of `dtype`
    float* lse;  // [batch][heads]: LSE of the union; or null
    const int32_t* active_rows;
    uint32_t batch;
    uint32_t heads;
    uint32_t head_dim;
    uint32_t dtype;  // DType
};

// -- gathering ---------------------------------------------------------------------------------------------------------

// Copy blocks from the host pool to slots in device memory. Entry i of the list copies the block of page pages[i] to slot
// destinations[i] of [owner][KV head][slots]; the slot number determines the KV head. Entries with page -1 are skipped.
// Entries out of bounds are skipped and counted.
struct sh_gather_blocks {
    const void* keys;  // a layer of the pool, at its device address: [page][KV head] blocks
    const void* values;  // as keys
    void* key_slots;
    void* value_slots;
    const float* steps;  // as for sh_attend_slots. Given: blocks of `dtype` become codes in the slots
    uint16_t* factors;  // [owner][KV head][slots][2][32], with steps
    const int32_t* pages;
    const int32_t* destinations;  // null: entry i goes to slot i
    const int32_t* count;  // the list has *count * per_count entries, at most `capacity`; null: `capacity` entries
    uint64_t* refused;  // the number of entries out of bounds is added; or null
    uint64_t* taken_ns;  // the time of the launch is added, as the mean of its CTAs' times; or null
    uint64_t destination_slots;  // owners * KV heads * slots
    uint32_t per_count;
    uint32_t capacity;
    uint32_t pool_pages;
    uint32_t kv_heads;
    uint32_t slots;
    uint32_t block_bytes;  // of a block's keys in the pool, or of its values; a multiple of 16
    uint32_t ctas;  // few: more CTAs do not make PCIe faster
    uint32_t dtype;  // DType of the pool, with steps
};

// -- mailbox -----------------------------------------------------------------------------------------------------------

enum sh_mailbox_outcome : uint32_t {  // what became of a row of a post
    sh_row_served = 0,
    sh_row_empty = 1,  // the row listed no blocks, so nothing waited for the worker
    sh_row_late = 2,
    sh_row_damaged = 3,  // the reply has a sequence number of the future, or another generation
    sh_row_refused = 4,  // by the worker: the request was out of bounds
    sh_row_withheld = 5,  // the row was never posted
    sh_row_outcomes = 6,
};

enum sh_waiting : uint32_t {  // histogram of the time that decode steps wait for the worker
    sh_wait_first_ns = 10000,  // upper bound of the first bucket; each further bucket has twice the bound of the one before
    sh_wait_buckets = 16,  // the last bucket has no bound
};

// State of the mailbox client between launches, in device memory; all zero at first.
struct sh_mailbox_state {
    uint64_t mailbox;  // device address of the mailbox; 0: there is no worker
    uint64_t sequence;  // of the newest post
    uint64_t late;  // sequence number of a post whose wait timed out, until the worker has caught up; 0: none
    uint32_t generation;  // number of decode steps so far
    uint32_t withheld;  // 1: nothing is posted
    uint32_t finished;  // CTAs of the running post that are done; 0 between launches
    uint32_t unused;
    // Totals over all steps:
    uint64_t outcomes[sh_row_outcomes];  // rows by outcome
    uint64_t blocks[sh_row_outcomes];  // listed blocks of these rows
    uint64_t waits[sh_wait_buckets];  // decode steps with a request to the worker, by the time that they waited
    uint64_t waited_ns;  // sum of the time that these steps waited
};

// What a wait has to know about its post. The number of blocks in each list of each batch entry follows in memory.
struct sh_receipt {
    uint64_t sequence;  // 0: nothing was posted
    uint32_t generation;
    uint32_t rows;
    uint32_t layer;
    uint32_t unused;
    // uint32_t lists[batch][1 + KV heads]: blocks in all lists of the row, then blocks of each list
};

// Post the block lists of one layer to the worker.
struct sh_mailbox_post {
    sh_mailbox_state* state;
    sh_receipt* receipt;  // is written for the wait of this post
    const void* query;  // [batch][KV head][group][head_dim] of the mailbox's dtype; null: values are summed by weights
    const int32_t* pages;  // [batch][KV head][listed]
    const int32_t* counts;  // [batch][KV head]: blocks of a list; the worker refuses a row if a list has more blocks than
    // `listed` or than the mailbox can hold
    const int32_t* last_fill;  // [batch][KV head]: tokens in the last block of a list; null with weights
    const int32_t* masks;  // [batch][KV head][listed], bit t: token t is attended; null: all tokens are
    const float* weights;  // [batch][KV head][group][weight_blocks][32], instead of a query
    const int32_t* positions;  // [batch][KV head][listed], with weights: which of the weight_blocks a listed block is
    const int32_t* active_rows;
    uint64_t* layer_waits;  // as in sh_mailbox_wait; the first post of a step adds up and clears the waits of the step before
    sglang_hybrid::Geometry geometry;
    sglang_hybrid::MailboxLayout layout;
    uint32_t batch;
    uint32_t listed;  // capacity of a list
    uint32_t layer;
    uint32_t begins_step;  // 1: this is the first post of a decode step, and starts a new generation
    float scale;
    uint32_t weight_blocks;
};

// Wait for the worker's replies to a post, and copy them to device memory.
struct sh_mailbox_wait {
    sh_mailbox_state* state;
    const sh_receipt* receipt;
    float* out;  // [batch][KV head][group][head_dim]; 0 where the LSE is -inf
    float* lse;  // [batch][KV head][group]; -inf for rows that are not served
    int32_t* served;  // [batch]: 1 if the row's reply is complete, or if the row listed no blocks
    uint64_t* layer_waits;  // [layers]: longest time that a row waited in this layer, in ns, at least 1; 0: no row waited
    uint64_t deadline_ns;  // from the kernel's start
    sglang_hybrid::Geometry geometry;
    sglang_hybrid::MailboxLayout layout;
    uint32_t batch;
    uint32_t unused;
};
