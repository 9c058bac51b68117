// The library's interface for other languages. Functions that can fail return 0 on success and put a sentence into
// `error` (may be null) otherwise. No function throws, and none keeps a pointer beyond the call unless it says so.
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/mailbox.h"

#define SH_API extern "C" __attribute__((visibility("default")))

// Counts up whenever a function or struct of this file or of mailbox.h changes.
inline constexpr uint32_t sh_interface = 7;
inline constexpr uint32_t sh_error_bytes = 256;

SH_API uint32_t sh_interface_version();

// -- kernels -----------------------------------------------------------------------------------------------------------

SH_API const char* sh_variants();
SH_API const char* sh_variant_name(uint32_t dtype, uint32_t head_dim, const char* variant);
SH_API int sh_attend(const sglang_hybrid::BlockAttention* task, const char* variant, char* error);
// Bytes per second that `threads` threads read together, front to back, in pieces of 1 MiB.
SH_API double sh_read_bandwidth(const void* memory, uint64_t bytes, uint32_t threads, const int32_t* cores);

// -- mailbox -----------------------------------------------------------------------------------------------------------

struct sh_field {
    const char* record;
    const char* name;
    uint32_t offset;
    uint32_t bytes;
};
SH_API const sh_field* sh_mailbox_fields(uint32_t* count);
SH_API int sh_mailbox_layout(const sglang_hybrid::Geometry* geometry, sglang_hybrid::MailboxLayout* layout, char* error);
// Write the header of a zeroed mailbox.
SH_API int sh_mailbox_create(void* mailbox, uint64_t bytes, const sglang_hybrid::Geometry* geometry, char* error);
// Read and check the header of a mailbox made by another process; `pool_bytes` is the true size of the pool's region.
SH_API int sh_mailbox_check(const void* mailbox, uint64_t bytes, uint64_t pool_bytes, sglang_hybrid::Geometry* geometry,
                            char* error);

// -- client: one thread at a time --------------------------------------------------------------------------------------

struct sh_client;
// `mailbox` stays in use until sh_client_close.
SH_API sh_client* sh_client_open(void* mailbox, const sglang_hybrid::Geometry* geometry, char* error);
SH_API void sh_client_close(sh_client* client);
// Block lists as `attend_blocks` of the reference has them: pages and fill [rows][KV head][listed] (int64, page -1 where
// the list is shorter), query [rows][KV head][group][head_dim]. Or, with weights, lists of blocks whose values are summed.
struct sh_lists {
    const void* query;
    const int64_t* pages;
    const int64_t* fill;
    const int32_t* masks;  // [rows][KV head][listed], bit t: token t of the block counts; or null: all of them do
    // [rows][KV head][group][listed][32], or null. If there are weights, values are summed by them: query, fill, masks and
    // scale are not looked at, and may be null
    const float* weights;
    uint32_t rows;
    uint32_t listed;
    uint32_t layer;
    float scale;
};
// Post one layer. Only the last block of a list may be partial. On success `sequence` is the post's number.
SH_API int sh_client_post(sh_client* client, const sh_lists* lists, uint32_t generation, uint64_t* sequence, char* error);
// What became of a row
enum sh_outcome : uint8_t {
    sh_late = 0,     // no reply in time
    sh_served = 1,
    sh_damaged = 2,  // refused, or a reply that cannot be: a sequence number of the future, another generation
};
// Wait until every row of the post is answered, `timeout_ns` are over, or *gone is not 0 (another thread sets it when
// the worker died). Copies what was answered to out [rows][KV head][group][head_dim] (left alone where a list was empty) and
// lse [rows][KV head][group] (0 of sums), and sets served[row] to an sh_outcome. Returns the number of rows that are not sh_served.
SH_API uint32_t sh_client_collect(sh_client* client, uint64_t sequence, uint64_t timeout_ns, const uint32_t* gone, float* out,
                                  float* lse, uint8_t* served);
SH_API void sh_client_wake(sh_client* client);
SH_API uint64_t sh_client_completed(const sh_client* client);
// 1 as soon as the worker's lead thread is no more, whatever ended it; 0: it lived all the time. Of workers with threads.
SH_API int sh_client_wait_for_end(const sh_client* client, uint64_t timeout_ns);
SH_API uint64_t sh_client_heartbeat(const sh_client* client);

// -- without a worker --------------------------------------------------------------------------------------------------

// The same computation in the calling process, to the bit, for the rows that are not sh_served (null: all rows).
// Uses up to `threads` threads, and only for as long as the call takes.
SH_API int sh_attend_local(const char* pool, const sglang_hybrid::Geometry* geometry, const sh_lists* lists,
                           uint32_t task_blocks, uint32_t threads, const uint8_t* served, float* out, float* lse, char* error);

// Attention weights of the lists' tokens: weights [rows][KV head][group][listed][32], 0 where no token counts. `lse`
// [rows][KV head][group] is of all tokens that the weights are shares of; -inf gives zeros. Threads as for sh_attend_local.
SH_API int sh_token_weights(const char* pool, const sglang_hybrid::Geometry* geometry, const sh_lists* lists, uint32_t threads,
                            const float* lse, float* weights, char* error);

// -- decode on a host without a GPU: one thread at a time -----------------------------------------------------------------

// What is known of one layer's blocks, kept up to date by sh_host_store, sh_host_decode and sh_host_summarise.
struct sh_host_layer {
    void* digests;            // [pages][KV head][2][head_dim], of the pool's dtype
    void* codes;              // [pages][KV head][32][channels / 2], or null
    const int64_t* channels;  // [KV head][channels], null without codes. Copied
};
struct sh_host_options {
    uint32_t threads;
    uint32_t budget_blocks;  // longer rows select so many blocks
    uint32_t sink_blocks, recent_blocks;  // always selected
    uint32_t channels;       // of a sketch, a multiple of 16; 0 without codes
    float spread;            // of estimates without codes
    void* openmp;            // GOMP_parallel of the process, whose threads are used then; or null
};
struct sh_host;
// `pool`, digests and codes stay in use until sh_host_close.
SH_API sh_host* sh_host_open(char* pool, const sglang_hybrid::Geometry* geometry, const sh_host_layer* layers,
                             const sh_host_options* options, char* error);
SH_API void sh_host_close(sh_host* host);
// The rows of the calls that follow. pages [rows][stride] of each row's blocks, lengths [rows] with the new tokens.
SH_API int sh_host_begin(sh_host* host, const int64_t* pages, uint32_t stride, const int64_t* lengths,
                         const int64_t* new_tokens, uint32_t rows, char* error);
// Rows of a tensor, `stride` bytes apart; one row is [heads][head_dim]. Keys and values have the pool's dtype.
struct sh_rows {
    const void* data;
    uint64_t stride;
};
// Keys and values of all new tokens, row after row, into the pool; and what digests and codes tell of their pages.
SH_API int sh_host_store(sh_host* host, uint32_t layer, const sh_rows* keys, const sh_rows* values, char* error);
// The same for one new token of each row, and its attention: out [rows][KV head][group][head_dim].
SH_API int sh_host_decode(sh_host* host, uint32_t layer, const sh_rows* query, const sh_rows* keys, const sh_rows* values,
                          float scale, float* out, char* error);
// Digests and codes of pages that somebody else wrote, whose first filled[i] tokens are valid.
SH_API int sh_host_summarise(sh_host* host, uint32_t layer, const int64_t* pages, const int64_t* filled, uint64_t count,
                             char* error);

// -- worker ------------------------------------------------------------------------------------------------------------

struct sh_engine;
struct sh_engine_options {
    uint32_t threads;        // that compute; 0: none, the owner answers posts itself with sh_engine_take
    uint32_t group_threads;  // threads of a group
    uint32_t task_blocks;    // blocks of one task, the unit of stealing
    uint32_t spin_us;        // how long to stay awake after the last post or wake
    const int32_t* cores;    // [threads] core of each thread, or null: not bound
    const char* variant;     // or null
};
struct sh_engine_stats {
    uint64_t posts;          // answered, as far as their rows came
    uint64_t rows;           // answered
    uint64_t refused_rows;   // out of bounds
    uint64_t abandoned_posts;  // given up: overtaken by newer ones, or their rows never came
    uint64_t blocks;         // attended
    uint64_t stolen_tasks;   // computed outside their own group
    uint64_t busy_ns;        // while posts were under way, from their arrival to their last reply
    uint64_t parks;          // times the worker went to sleep
    uint64_t tasks;
};
// `mailbox` and `pool` stay in use until sh_engine_stop, which ends all threads.
SH_API sh_engine* sh_engine_start(void* mailbox, const char* pool, const sglang_hybrid::Geometry* geometry,
                                  const sh_engine_options* options, char* error);
SH_API void sh_engine_stop(sh_engine* engine);
// Threads that compute: fewer than asked for where a limit did not allow more.
SH_API uint32_t sh_engine_threads(const sh_engine* engine);
SH_API void sh_engine_read_stats(const sh_engine* engine, sh_engine_stats* stats);

// One post, copied and checked, for providers that compute elsewhere. Rows that are out of bounds have been refused
// already and have empty lists here.
struct sh_job {
    uint64_t sequence;
    uint32_t layer;
    uint32_t rows;
    float scale;
    uint32_t kind;          // PostKind
    const void* query;      // [rows][KV head][group][head_dim]
    const uint32_t* count;  // [rows][KV head]
    const uint32_t* last_fill;
    const uint32_t* pages;  // [rows][KV head][max_blocks]
    const uint32_t* masks;  // likewise; or null: all tokens count
    const float* weights;   // [rows][KV head][group][max_blocks][32]; null unless values are summed
};
// Wait for a post: 1 and a job that is valid until sh_engine_answer, or 0 when `timeout_us` are over.
SH_API int sh_engine_take(sh_engine* engine, uint64_t timeout_us, sh_job* job);
SH_API void sh_engine_answer(sh_engine* engine, const float* out, const float* lse);
