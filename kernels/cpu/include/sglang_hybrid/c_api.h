// The library's interface for other languages. Functions that can fail write a sentence to `error` (sh_error_bytes, may be
// null) when they do; those that return an int then return 1, and 0 on success, and those that return a pointer return null.
// No function throws. No function keeps a pointer after the call unless its comment says so.
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/mailbox.h"

#define SH_API extern "C" __attribute__((visibility("default")))

// Version of the interface: incremented whenever a function or struct of this file or of mailbox.h changes.
inline constexpr uint32_t sh_interface = 8;
inline constexpr uint32_t sh_error_bytes = 256;

SH_API uint32_t sh_interface_version();

// -- kernels -----------------------------------------------------------------------------------------------------------

// See variants(), variant_name() and attend() in block_attention.h.
SH_API const char* sh_variants();
SH_API const char* sh_variant_name(uint32_t dtype, uint32_t head_dim, const char* variant);
SH_API int sh_attend(const sglang_hybrid::BlockAttention* task, const char* variant, char* error);
// Return the bytes per second at which `threads` threads together read `memory` once, front to back, in pieces of 1 MiB.
// `cores` [threads] is the core of each thread, or null: not bound. 0: no thread could be started.
SH_API double sh_read_bandwidth(const void* memory, uint64_t bytes, uint32_t threads, const int32_t* cores);

// -- mailbox -----------------------------------------------------------------------------------------------------------

// Offset and size of a field of one of mailbox.h's structs. An empty name stands for the whole struct.
struct sh_field {
    const char* record;
    const char* name;
    uint32_t offset;
    uint32_t bytes;
};
SH_API const sh_field* sh_mailbox_fields(uint32_t* count);
// Compute the layout of a mailbox for `geometry`.
SH_API int sh_mailbox_layout(const sglang_hybrid::Geometry* geometry, sglang_hybrid::MailboxLayout* layout, char* error);
// Write the header into a mailbox whose memory is all zeros.
SH_API int sh_mailbox_create(void* mailbox, uint64_t bytes, const sglang_hybrid::Geometry* geometry, char* error);
// Check the header of a mailbox that another process created, and copy its geometry to `geometry`. `pool_bytes` is the actual
// size of the host pool's region.
SH_API int sh_mailbox_check(const void* mailbox, uint64_t bytes, uint64_t pool_bytes, sglang_hybrid::Geometry* geometry,
                            char* error);

// -- client: may be called by one thread at a time ---------------------------------------------------------------------

struct sh_client;
// Return a client that posts to `mailbox`, or null on failure. `mailbox` must stay mapped until sh_client_close.
SH_API sh_client* sh_client_open(void* mailbox, const sglang_hybrid::Geometry* geometry, char* error);
SH_API void sh_client_close(sh_client* client);
// Block lists of one layer, laid out like those of `attend_blocks` in sglang_hybrid/ops/reference.py: query
// [rows][KV head][group][head_dim], pages and fill (tokens of each block) [rows][KV head][listed], page -1 behind the end of a
// list. With `weights`, values of the listed blocks are summed instead.
struct sh_lists {
    const void* query;
    const int64_t* pages;
    const int64_t* fill;
    const int32_t* masks;  // [rows][KV head][listed], bit t: token t of the block counts; or null: all tokens count
    // [rows][KV head][group][listed][32], or null. With weights, values are summed by them; query, fill, masks and scale
    // are ignored, and pointers may be null
    const float* weights;
    uint32_t rows;
    uint32_t listed;
    uint32_t layer;
    float scale;
};
// Post one layer's lists to the worker. Only the last block of a list may have fewer than 32 tokens. On success `sequence` is
// set to the sequence number of the post.
SH_API int sh_client_post(sh_client* client, const sh_lists* lists, uint32_t generation, uint64_t* sequence, char* error);
// The outcome of one posted row.
enum sh_outcome : uint8_t {
    sh_late = 0,     // no reply in time
    sh_served = 1,
    sh_damaged = 2,  // refused, or an invalid reply: a sequence number never posted, or a wrong generation or check
    sh_overwritten = 3,  // a newer post took the slot, see sh_client_collect
};
// Wait until every row of the post is answered, `timeout_ns` have passed, or *gone is not 0 (another thread sets it when the
// worker dies). `rows` is the number of rows that were posted. Copies the answers to out [rows][KV head][group][head_dim] (not
// written where a list is empty) and to lse [rows][KV head][group] (0 for sums), and sets served[row] to an sh_outcome. Returns
// how many rows are not sh_served. At most mailbox_slots posts can be outstanding: one more takes the slot of the oldest, which
// nobody can collect any more. All rows of such a post are sh_overwritten, at once, and out and lse are left alone.
SH_API uint32_t sh_client_collect(sh_client* client, uint64_t sequence, uint32_t rows, uint64_t timeout_ns,
                                  const uint32_t* gone, float* out, float* lse, uint8_t* served);
// Wake the worker, or keep it awake for its spin time, because a post follows soon.
SH_API void sh_client_wake(sh_client* client);
// See WorkerLine in mailbox.h.
SH_API uint64_t sh_client_completed(const sh_client* client);
// Wait up to `timeout_ns` for the worker's lead thread to end. Returns 1 as soon as the thread has ended, for any reason, 0 if
// the thread is still alive. Works only with a worker whose engine has threads.
SH_API int sh_client_wait_for_end(const sh_client* client, uint64_t timeout_ns);
// See WorkerLine in mailbox.h.
SH_API uint64_t sh_client_heartbeat(const sh_client* client);

// -- without a worker --------------------------------------------------------------------------------------------------

// Compute in the calling process, bit for bit, what the worker computes, for the rows whose served[row] is not sh_served (all
// rows if `served` is null). Uses up to `threads` threads, which end before the call returns.
SH_API int sh_attend_local(const char* pool, const sglang_hybrid::Geometry* geometry, const sh_lists* lists,
                           uint32_t task_blocks, uint32_t threads, const uint8_t* served, float* out, float* lse, char* error);

// Write the attention weights of the lists' tokens to weights [rows][KV head][group][listed][32]; 0 for tokens that do not
// count. `lse` [rows][KV head][group] is the LSE over all tokens that the weights are shares of; -inf makes all weights of
// that head 0. `threads` as for sh_attend_local.
SH_API int sh_token_weights(const char* pool, const sglang_hybrid::Geometry* geometry, const sh_lists* lists, uint32_t threads,
                            const float* lse, float* weights, char* error);

// -- decode on a host without a GPU: may be called by one thread at a time ------------------------------------------------

// Digests and sketches of one layer's blocks, updated by sh_host_store, sh_host_decode and sh_host_summarise.
struct sh_host_layer {
    void* digests;            // [pages][KV head][2][head_dim], of the pool's dtype
    void* codes;              // sketches [pages][KV head][32][channels / 2], or null
    const int64_t* channels;  // channels of the sketches in a key [KV head][channels], copied; null without codes
};
struct sh_host_options {
    uint32_t threads;
    uint32_t budget_blocks;  // blocks that a row with more blocks selects, for each KV head
    uint32_t sink_blocks, recent_blocks;  // always selected
    uint32_t channels;       // of a sketch, a multiple of 16; 0 without codes
    float spread;            // of estimates from digests alone: `spread` of reference.digest_logits
    void* openmp;            // GOMP_parallel of the runtime whose threads to use; null: each call starts threads
};
struct sh_host;
// Return a decoder, or null on failure. `layers` has one element per layer. `pool`, digests and codes must stay valid until
// sh_host_close.
SH_API sh_host* sh_host_open(char* pool, const sglang_hybrid::Geometry* geometry, const sh_host_layer* layers,
                             const sh_host_options* options, char* error);
SH_API void sh_host_close(sh_host* host);
// Set the rows of the following calls: pages [rows][stride] of each row's blocks, lengths [rows] in tokens including the new
// ones, new_tokens [rows]. The arrays are copied.
SH_API int sh_host_begin(sh_host* host, const int64_t* pages, uint32_t stride, const int64_t* lengths,
                         const int64_t* new_tokens, uint32_t rows, char* error);
// Rows of a tensor, `stride` bytes apart; one row is [heads][head_dim]. Keys and values have the pool's dtype.
struct sh_rows {
    const void* data;
    uint64_t stride;
};
// Store the keys and values of all new tokens, row after row, in the pool, and update the digests and codes of their pages.
SH_API int sh_host_store(sh_host* host, uint32_t layer, const sh_rows* keys, const sh_rows* values, char* error);
// Store one new token of each row like sh_host_store, and write its attention to out [rows][KV head][group][head_dim].
SH_API int sh_host_decode(sh_host* host, uint32_t layer, const sh_rows* query, const sh_rows* keys, const sh_rows* values,
                          float scale, float* out, char* error);
// Update the digests and codes of `count` pages that another component wrote. The first filled[i] tokens of pages[i] are valid.
SH_API int sh_host_summarise(sh_host* host, uint32_t layer, const int64_t* pages, const int64_t* filled, uint64_t count,
                             char* error);

// -- worker ------------------------------------------------------------------------------------------------------------

struct sh_engine;
struct sh_engine_options {
    uint32_t threads;        // threads that compute; 0: none, the owner computes posts itself with sh_engine_take
    uint32_t group_threads;  // threads of a group
    uint32_t task_blocks;    // most blocks of one task, the unit of stealing; long lists have larger tasks
    uint32_t spin_us;        // how long to stay awake after the last post or wake
    const int32_t* cores;    // [threads] core of each thread, or null: not bound
    const char* variant;     // see find_kernel; or null
};
struct sh_engine_stats {
    uint64_t posts;          // completed posts: all rows that arrived were answered
    uint64_t rows;           // answered rows, empty ones included
    uint64_t refused_rows;   // rows refused because they were out of bounds
    uint64_t abandoned_posts;  // posts given up: overtaken by newer ones, or with rows that never arrived
    uint64_t blocks;         // attended blocks
    uint64_t stolen_tasks;   // tasks computed by a thread of another group
    uint64_t busy_ns;        // time with posts under way, from their arrival to their last reply
    uint64_t parks;          // times the worker went to sleep
    uint64_t tasks;          // computed tasks
};
// Start an engine; null on failure. `mailbox` and `pool` must stay mapped until sh_engine_stop, which ends all threads.
SH_API sh_engine* sh_engine_start(void* mailbox, const char* pool, const sglang_hybrid::Geometry* geometry,
                                  const sh_engine_options* options, char* error);
SH_API void sh_engine_stop(sh_engine* engine);
// Return the number of threads that compute. It is lower than requested if the system did not allow more threads.
SH_API uint32_t sh_engine_threads(const sh_engine* engine);
SH_API void sh_engine_read_stats(const sh_engine* engine, sh_engine_stats* stats);

// A private, checked copy of one post, for providers that compute outside of this library. Rows that are out of bounds are
// refused already and have empty lists here.
struct sh_job {
    uint64_t sequence;
    uint32_t layer;
    uint32_t rows;
    float scale;
    uint32_t kind;          // PostKind
    const void* query;      // [rows][KV head][group][head_dim]
    const uint32_t* count;  // blocks [rows][KV head]
    const uint32_t* last_fill;  // tokens in the last block [rows][KV head]; undefined where count is 0
    const uint32_t* pages;  // [rows][KV head][max_blocks]
    const uint32_t* masks;  // [rows][KV head][max_blocks]; or null: all tokens count
    const float* weights;   // [rows][KV head][group][max_blocks][32]; null unless values are summed
};
// Wait up to `timeout_us` for a post. Returns 1 and fills in `job`, whose pointers are valid until sh_engine_answer, or returns
// 0 if no post arrived or the engine has threads. One thread at a time.
SH_API int sh_engine_take(sh_engine* engine, uint64_t timeout_us, sh_job* job);
// Reply to the job taken last: out [rows][KV head][group][head_dim] and lse [rows][KV head][group].
SH_API void sh_engine_answer(sh_engine* engine, const float* out, const float* lse);
