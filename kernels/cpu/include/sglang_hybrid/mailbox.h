// The mailbox: how one layer's block lists get to the worker and partial attention gets back. This header is the only
// definition of the layout. C++ and CUDA include it; Python reads it through sh_mailbox_fields() of the library.
//
//     Header │ Bell │ WorkerLine │ ClientLine │ Post x 2 │ Request x 2 x rows │ Reply x 2 x rows │ arrays
//
// A post is one layer for a whole batch. Its sequence number counts up by one and chooses the slot: sequence % 2, so
// that one layer can be posted while the one before is computed. Within a slot each row has a request and a reply.
//
// Order of writes (every flag below is written with release and read with acquire, at system scope on a GPU):
//   client   0 to every Reply[r].sequence    then  what follows            what was there is no reply to this post
//            arrays and fields of row r      then  Request[r].sequence     any row in any order, by any thread or CTA
//            fields of the post              then  Post.sequence           may come before the rows' requests
//                                            then  Bell.posted             the worker looks at this word only
//   worker   out, lse, check, fields of r    then  Reply[r].sequence       the reply of row r is complete
//            all replies of the post         then  WorkerLine.completed
// A reply counts only if both its sequence and its generation are those of the request, and, for a client in host memory, if
// it was computed from what was posted, which its check tells: layer, kind, scale, lists, page numbers and masks. Queries,
// outputs and LSEs have no check, as weights and keys have none. A client that gave up waiting
// may reuse the slot: the worker answers the posts of a slot strictly one after the other, so nothing it writes for an
// older post can come after the reply of a newer one there. Replies of the post in the other slot may come before the last
// ones of an older post; `completed` never does.
//
// Parking (Dekker: each side stores its own word, then loads the other's, sequentially consistent): an idle worker sets
// `parked` and looks at `posted` again before it sleeps on `wake`; a client stores `posted` and then looks at `parked`.
// A GPU cannot wake anybody: the host says "work is near" (sh_client_wake) before it launches, and the worker stays awake for
// its spinning time after every post and every wake.
#pragma once

#include <cstdint>

namespace sglang_hybrid {

inline constexpr uint64_t mailbox_magic = 0x786f626c69616d68;  // "hmailbox"
inline constexpr uint32_t mailbox_version = 4;
inline constexpr uint32_t mailbox_slots = 2;
inline constexpr uint64_t mailbox_alignment = 4096;  // of every array

// What a mailbox has room for beside lists of whole blocks: bits of Geometry::flags.
enum GeometryFlag : uint64_t {
    geometry_masks = 1,       // masks of tokens
    geometry_value_sums = 2,  // weights, of posts that ask for sums of values
};
inline constexpr uint64_t known_geometry_flags = geometry_masks | geometry_value_sums;

// What both sides must agree on. Bytes are offsets into the region of the host pool, for which every layer has one K and
// one V piece: [page][KV head][32 tokens][head_dim].
struct Geometry {
    uint32_t rows;        // most rows of a post
    uint32_t kv_heads;    // of this rank
    uint32_t group;       // query heads per KV head
    uint32_t head_dim;
    uint32_t dtype;       // DType, which tells both: of the pool, and of queries
    uint32_t max_blocks;  // most blocks of one list
    uint32_t layers;
    uint32_t pages;       // of one layer
    uint64_t keys;        // bytes from the region's start to layer 0's keys
    uint64_t values;
    uint64_t layer_stride;  // bytes from a layer's keys to the next layer's, likewise for values
    uint64_t pool_bytes;    // of the region
    uint64_t flags;         // GeometryFlag
};

struct Header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;  // sizeof(Header)
    uint64_t mailbox_bytes;
    Geometry geometry;
};

struct alignas(128) Bell {
    uint64_t posted;  // newest sequence number; 0 before the first
};

struct alignas(128) WorkerLine {
    uint64_t completed;  // every post up to this one is answered or was given up
    uint64_t heartbeat;  // counts up several times a second while the worker waits for posts
    uint32_t parked;     // 1 while the worker sleeps on ClientLine.wake
    uint32_t done;       // futex: changes after every post that is answered
    uint32_t life;       // robust futex that the worker's lead thread owns as long as it lives, see engine/life.h
};

struct alignas(128) ClientLine {
    uint32_t wake;     // futex: changes when the client wants the worker awake
    uint32_t waiting;  // 1 while the client sleeps on WorkerLine.done
    uint64_t gone;     // 1 once the client's host has given the worker up: a GPU that waits for replies stops waiting
};

enum class PostKind : uint32_t {
    attend = 0,         // attention over all tokens of the lists' blocks
    attend_masked = 1,  // over those whose bit in the block's mask is set; only where the geometry has masks
    // Sums of values by the client's weights, only where the geometry has value sums: instead of a query the client writes
    // weights. The LSE of a list that has blocks is 0; queries and scale are not looked at. Weights are floats: rounded to
    // 16 bits they would cost the sums their precision and save a few hundredths of the bytes that a sum reads.
    sum_values = 2,
};

struct alignas(64) Post {
    uint64_t sequence;
    uint32_t layer;
    uint32_t rows;
    float scale;
    uint32_t kind;  // PostKind
};

struct alignas(16) Request {
    uint64_t sequence;
    uint32_t generation;  // chosen by the client and given back; changes at least when the row gets another request
    uint32_t blocks;      // in all lists of the row; 0: nothing else of the row is written or read
};

enum class ReplyStatus : uint32_t {
    answered = 0,
    empty = 1,    // the row had no blocks: output and LSE are not written
    refused = 2,  // the request was out of bounds, nothing was computed
};

struct alignas(16) Reply {
    uint64_t sequence;
    uint32_t generation;
    uint32_t status;  // ReplyStatus
};

// Of each (row, KV head)
struct List {
    uint32_t count;      // blocks
    uint32_t last_fill;  // tokens in the last one, 1 to 32
};

// Where things are, in bytes from the mailbox's start. A pure function of the geometry: never stored in the mailbox.
struct MailboxLayout {
    uint64_t bell, worker, client, posts;
    uint64_t requests;  // [slot][row] Request
    uint64_t replies;   // [slot][row] Reply
    uint64_t checks;    // [slot][row] uint64_t: what an answered reply was computed from, see checks.h
    uint64_t lists;     // [slot][row][KV head] List
    uint64_t pages;     // [slot][row][KV head][max_blocks] uint32_t
    uint64_t masks;     // likewise, bit t: token t of the block counts; no bytes where the geometry has no masks
    uint64_t queries;   // [slot][row][KV head][group][head_dim] of query_dtype
    uint64_t weights;   // [slot][row][KV head][group][max_blocks][32] float, see sum_values; no bytes without value sums
    uint64_t outputs;   // [slot][row][KV head][group][head_dim] float; undefined where the LSE is -inf
    uint64_t lses;      // [slot][row][KV head][group] float
    uint64_t bytes;
};

MailboxLayout layout_of(const Geometry& geometry);

// Null if the geometry can be served from a region of that size; else what is wrong with it, in words.
const char* problem_of(const Geometry& geometry);

}  // namespace sglang_hybrid
