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

// Optional arrays of a mailbox, beside lists of whole blocks: bits of Geometry::flags.
enum GeometryFlag : uint64_t {
    geometry_masks = 1,       // masks of tokens, for posts of kind attend_masked
    geometry_value_sums = 2,  // weights, for posts of kind sum_values
};
inline constexpr uint64_t known_geometry_flags = geometry_masks | geometry_value_sums;

// The shape of pool and mailbox, which client and worker must agree on. Byte offsets are from the start of the host pool's
// region, where every layer has one K piece and one V piece: [page][KV head][32 tokens][head_dim].
struct Geometry {
    uint32_t rows;        // most rows of a post
    uint32_t kv_heads;    // of this rank
    uint32_t group;       // query heads per KV head
    uint32_t head_dim;
    uint32_t dtype;       // DType: the dtype of the pool and the dtype of queries
    uint32_t max_blocks;  // most blocks of one list
    uint32_t layers;
    uint32_t pages;       // of one layer
    uint64_t keys;        // bytes from the region's start to layer 0's keys
    uint64_t values;      // bytes from the region's start to layer 0's values
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
    uint64_t completed;  // every post up to this sequence number is answered or was given up
    uint64_t heartbeat;  // counts up several times a second while the worker waits for posts
    uint32_t parked;     // 1 while the worker sleeps on ClientLine.wake
    uint32_t done;       // futex: changes when a post is completed while the client sleeps on it
    uint32_t life;       // robust futex that the worker's lead thread owns as long as it lives, see engine/life.h
};

struct alignas(128) ClientLine {
    uint32_t wake;     // futex: the client changes it to wake the worker
    uint32_t waiting;  // 1 while the client sleeps on WorkerLine.done
    uint64_t gone;     // 1 once the server has given up the worker: a GPU that waits for replies stops waiting
};

enum class PostKind : uint32_t {
    attend = 0,         // attention over all tokens of the lists' blocks
    attend_masked = 1,  // attention over tokens whose bit in the block's mask is set; only if the geometry has masks
    // Sums of values by the client's weights; only if the geometry has value sums. The client writes weights instead of a
    // query. The LSE of a list that has blocks is 0; queries and scale are ignored. Weights are floats: weights in 16 bits
    // would cost the sums their precision and save only a few hundredths of the bytes that a sum reads.
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
    uint32_t generation;  // chosen by the client, repeated in the reply; changes when another request takes the row
    uint32_t blocks;      // blocks in all lists of the row; 0: nothing else of the row is written or read
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

// Length of the block list of one (row, KV head).
struct List {
    uint32_t count;      // blocks
    uint32_t last_fill;  // tokens in the last block, 1 to 32
};

// Offset of each array in bytes from the mailbox's start. A pure function of the geometry: never stored in the mailbox.
struct MailboxLayout {
    uint64_t bell, worker, client, posts;
    uint64_t requests;  // [slot][row] Request
    uint64_t replies;   // [slot][row] Reply
    uint64_t checks;    // [slot][row] uint64_t: checksum of what an answered reply was computed from, see checks.h
    uint64_t lists;     // [slot][row][KV head] List
    uint64_t pages;     // [slot][row][KV head][max_blocks] uint32_t
    uint64_t masks;     // like pages, bit t: token t of the block counts; no bytes if the geometry has no masks
    uint64_t queries;   // [slot][row][KV head][group][head_dim] of query_dtype
    uint64_t weights;   // [slot][row][KV head][group][max_blocks][32] float, see sum_values; no bytes without value sums
    uint64_t outputs;   // [slot][row][KV head][group][head_dim] float; undefined where the LSE is -inf
    uint64_t lses;      // [slot][row][KV head][group] float
    uint64_t bytes;     // of the whole mailbox
};

// Compute the layout for a geometry without problems.
MailboxLayout layout_of(const Geometry& geometry);

// Return null if a pool region of geometry.pool_bytes can serve the geometry; else a sentence that says what is wrong with it.
const char* problem_of(const Geometry& geometry);

}  // namespace sglang_hybrid
