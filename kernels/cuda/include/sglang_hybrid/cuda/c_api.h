// What the CUDA library offers to other languages. A launcher takes one struct of device pointers and sizes, which the
// kernel gets as it is, and a stream; it returns a cudaError_t. Launchers allocate nothing and wait for nothing, so all
// of them can be captured in a CUDA graph.
//
// Static shapes: a launch covers `batch` entries. `active_rows` points to how many of them are real, in device memory
// (null: all); entries from there on are neither read nor written.
#pragma once

#include <cstdint>

#include "sglang_hybrid/mailbox.h"

// -- attention over slots ----------------------------------------------------------------------------------------------

// One token for each (batch entry, KV head). A block at position p has min(32, length - 32 p) tokens that count.
struct sh_attend_slots {
    const void* query;  // [batch][KV head][group][head_dim]
    const void* keys;   // [row][KV head][slots][32][head_dim]
    const void* values;
    const int32_t* positions;  // [row][KV head][slots]: which block of its row's sequence a slot holds, -1: none
    const int32_t* row_of;   // [batch]; a row that does not exist has no tokens
    const int32_t* lengths;  // [rows]
    const int32_t* active_rows;
    const float* near_bias;  // [rows][KV head][group], or null: added to the logits of blocks that are always in. Behind the
    // LSE nothing tells it from other logits
    float* out;  // [batch][KV head][group][head_dim]; 0 where no token counts
    float* lse;  // [batch][KV head][group], natural logarithm
    // Workspace: for `units` partial results, and [batch][KV head] words that are 0 before and after a launch.
    float* partial_out;
    float* partial_lse;
    uint32_t* arrived;
    float scale;
    uint32_t rows;
    uint32_t batch;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t head_dim;
    uint32_t dtype;  // DType of keys and values, and of the query
    uint32_t units;  // of sh_cuda_attend_units; with fewer the device is not used to the full
    uint32_t slots;
    uint32_t sink;  // blocks that are always in, with near_bias: these,
    uint32_t recent;  // and these before the tail
    uint32_t unused;
};

// -- merging -----------------------------------------------------------------------------------------------------------

struct sh_side {
    const float* out;  // [batch][heads][head_dim]
    const float* lse;  // [batch][heads]; -inf: there is nothing, whatever the output is
};

// As `merge` of the reference does it.
struct sh_merge {
    sh_side first;
    sh_side second;
    void* out;   // [batch][heads][head_dim] of `dtype`
    float* lse;  // or null
    const int32_t* active_rows;
    uint32_t batch;
    uint32_t heads;
    uint32_t head_dim;
    uint32_t dtype;  // DType
};

// -- gathering ---------------------------------------------------------------------------------------------------------

// Entry i of the list: the block of page pages[i] goes to slot destinations[i] of [owner][KV head][slots]. The slot says
// which KV head it is. Entries with page -1 are none; those out of bounds are left out and counted.
struct sh_gather_blocks {
    const void* keys;  // a layer of the pool, as the device sees it: [page][KV head] blocks
    const void* values;
    void* key_slots;
    void* value_slots;
    const int32_t* pages;
    const int32_t* destinations;  // null: entry i goes to slot i
    const int32_t* count;         // the list has *count * per_count entries, at most `capacity`; null: all of them
    uint64_t* refused;            // entries out of bounds, added up; or null
    uint64_t destination_slots;   // owners * KV heads * slots
    uint32_t per_count;
    uint32_t capacity;
    uint32_t pool_pages;
    uint32_t kv_heads;
    uint32_t slots;
    uint32_t block_bytes;  // of keys or values; a multiple of 16
    uint32_t ctas;         // few: what crosses PCIe does not get faster by more
};

// -- mailbox -----------------------------------------------------------------------------------------------------------

enum sh_mailbox_outcome : uint32_t {  // of a row
    sh_row_served = 0,
    sh_row_empty = 1,     // had no blocks: nobody was waited for
    sh_row_late = 2,
    sh_row_damaged = 3,   // a sequence number of the future, or another generation
    sh_row_refused = 4,   // by the worker: out of bounds
    sh_row_withheld = 5,  // was never posted
    sh_row_outcomes = 6,
};

enum sh_waiting : uint32_t {  // of decode steps for the worker, by their length
    sh_wait_first_ns = 10000,  // bound of the first bucket; every other one doubles the one before
    sh_wait_buckets = 16,      // the last one has no bound
};

// The client's memory between launches, in device memory; all zero at first.
struct sh_mailbox_state {
    uint64_t mailbox;     // as the device sees it; 0: there is no worker
    uint64_t sequence;    // of the newest post
    uint64_t late;        // a post that was waited for in vain, until the worker has caught up; 0: none
    uint32_t generation;  // decode steps so far
    uint32_t withheld;    // 1: nothing is posted
    uint32_t finished;    // CTAs of the running post that are through; 0 between launches
    uint32_t unused;
    // added up over all steps:
    uint64_t outcomes[sh_row_outcomes];  // rows
    uint64_t blocks[sh_row_outcomes];    // of these rows
    uint64_t waits[sh_wait_buckets];     // decode steps that asked the worker for something
    uint64_t waited_ns;                  // by these steps
};

// What a wait has to know about its post; followed by what it asked for of every batch entry.
struct sh_receipt {
    uint64_t sequence;  // 0: nothing was posted
    uint32_t generation;
    uint32_t rows;
    uint32_t layer;
    uint32_t unused;
    // uint32_t lists[batch][1 + KV heads]: blocks of the row, then of each list
};

struct sh_mailbox_post {
    sh_mailbox_state* state;
    sh_receipt* receipt;
    const void* query;  // [batch][KV head][group][head_dim] of the mailbox's dtype; null: values are summed by weights
    const int32_t* pages;  // [batch][KV head][listed]
    const int32_t* counts;  // [batch][KV head]; a row with more than `listed`, or than the mailbox holds, is refused
    const int32_t* last_fill;  // [batch][KV head] tokens in the last block of a list; null with weights
    const int32_t* masks;  // [batch][KV head][listed], bit t: token t counts; null: all of them do
    const float* weights;  // [batch][KV head][group][weight_blocks][32], instead of a query
    const int32_t* positions;  // [batch][KV head][listed], with weights: which of weight_blocks a listed block has
    const int32_t* active_rows;
    uint64_t* layer_waits;  // as in sh_mailbox_wait; the first post of a step adds up those of the step before
    sglang_hybrid::Geometry geometry;
    sglang_hybrid::MailboxLayout layout;
    uint32_t batch;
    uint32_t listed;
    uint32_t layer;
    uint32_t begins_step;  // 1: the first post of a decode step, which gets a generation of its own
    float scale;
    uint32_t weight_blocks;
};

struct sh_mailbox_wait {
    sh_mailbox_state* state;
    const sh_receipt* receipt;
    float* out;  // [batch][KV head][group][head_dim]; 0 where the LSE is -inf
    float* lse;  // [batch][KV head][group]; -inf for rows that are not served
    int32_t* served;  // [batch]: 1 where the row is complete, be it without blocks
    uint64_t* layer_waits;  // [layers]: ns that the row waited that waited longest, at least 1; 0: nobody was asked
    uint64_t deadline_ns;  // from the kernel's start
    sglang_hybrid::Geometry geometry;
    sglang_hybrid::MailboxLayout layout;
    uint32_t batch;
    uint32_t unused;
};
