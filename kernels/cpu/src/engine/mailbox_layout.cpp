#include <initializer_list>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/mailbox.h"

namespace sglang_hybrid {
namespace {

// Limits far above every model, and far too small for their products to overflow 64 bits.
constexpr uint32_t most_rows = 1 << 16;
constexpr uint32_t most_heads = 1 << 8;
constexpr uint32_t most_blocks = 1 << 20;
constexpr uint32_t most_layers = 1 << 12;

uint64_t align(uint64_t bytes) { return (bytes + mailbox_alignment - 1) / mailbox_alignment * mailbox_alignment; }

}  // namespace

MailboxLayout layout_of(const Geometry& g) {
    const uint64_t rows = uint64_t{mailbox_slots} * g.rows;
    const uint64_t heads = rows * g.kv_heads;
    const uint64_t values = heads * g.group * g.head_dim;
    MailboxLayout at{};
    uint64_t end = align(sizeof(Header));
    const auto take = [&end](uint64_t bytes) {
        const uint64_t start = end;
        end += align(bytes);
        return start;
    };
    at.bell = take(sizeof(Bell) + sizeof(WorkerLine) + sizeof(ClientLine) + mailbox_slots * sizeof(Post));
    at.worker = at.bell + sizeof(Bell);
    at.client = at.worker + sizeof(WorkerLine);
    at.posts = at.client + sizeof(ClientLine);
    at.requests = take(rows * sizeof(Request));
    at.replies = take(rows * sizeof(Reply));
    at.checks = take(rows * sizeof(uint64_t));
    at.lists = take(heads * sizeof(List));
    at.pages = take(heads * g.max_blocks * sizeof(uint32_t));
    at.masks = take(g.flags & geometry_masks ? heads * g.max_blocks * sizeof(uint32_t) : 0);
    at.queries = take(values * query_bytes_of(static_cast<DType>(g.dtype)));
    at.weights = take(g.flags & geometry_value_sums ? heads * g.group * g.max_blocks * block_tokens * sizeof(float) : 0);
    at.outputs = take(values * sizeof(float));
    at.lses = take(heads * g.group * sizeof(float));
    at.bytes = end;
    return at;
}

const char* problem_of(const Geometry& g) {
    if (g.rows < 1 || g.rows > most_rows) return "rows must be 1 to 65536";
    if (g.kv_heads < 1 || g.kv_heads > most_heads) return "KV heads must be 1 to 256";
    if (g.group < 1 || g.group > max_group) return "query heads per KV head must be 1 to 16";
    if (g.head_dim < 1 || g.head_dim > max_head_dim || g.head_dim % 8) return "head_dim must be a multiple of 8 up to 256";
    if (g.dtype > static_cast<uint32_t>(last_dtype)) {
        return "the dtype must be bfloat16, float16 or float32, or FP8 with queries of one of these";
    }
    if (g.max_blocks < 1 || g.max_blocks > most_blocks) return "blocks of a list must be 1 to 1048576";
    if (g.layers < 1 || g.layers > most_layers) return "layers must be 1 to 4096";
    if (g.flags & ~known_geometry_flags) return "the geometry has flags that this side does not know";
    if (g.pages < 1) return "the pool has no pages";
    const uint64_t block = uint64_t{block_tokens} * g.head_dim * bytes_of(static_cast<DType>(g.dtype));
    const uint64_t layer = block * g.kv_heads * g.pages;  // at most 2^15 * 2^8 * 2^32
    if (g.layer_stride < layer) return "layers overlap in the pool";
    if (g.keys % 64 || g.values % 64 || g.layer_stride % 64) return "keys and values must be aligned to 64 bytes";
    for (const uint64_t first : {g.keys, g.values}) {
        if (layer > g.pool_bytes || first > g.pool_bytes - layer) return "the pool is smaller than its layers";
        if (g.layers > 1 && g.layer_stride > (g.pool_bytes - layer - first) / (g.layers - 1)) {
            return "the pool is smaller than its layers";
        }
    }
    return nullptr;
}

}  // namespace sglang_hybrid
