// The worker's computation in the calling process: for what the worker did not answer in time.
#include "engine/local.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "engine/mailbox_client.h"
#include "engine/tasks.h"
#include "helpers.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t blocks_per_thread = 64;  // below that a thread costs more than it brings

// One (row, KV head) with blocks.
struct Unit {
    uint32_t row, head;
    List list;
    Split split;
    uint64_t first_task;
};

struct AlignedBytes {
    explicit AlignedBytes(uint64_t bytes) : data(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
        if (!data) throw std::bad_alloc();
    }
    ~AlignedBytes() { std::free(data); }
    char* const data;
};

}  // namespace

void attend_local(const char* pool, const Geometry& g, const sh_lists& lists, uint32_t task_blocks, uint32_t threads,
                  const uint8_t* served, float* out, float* lse, Kernel kernel) {
    const uint64_t query_bytes = partial_out_floats(g) * bytes_of(static_cast<DType>(g.dtype));
    std::vector<Unit> units;
    uint64_t tasks = 0, blocks = 0;
    for (uint32_t row = 0; row < lists.rows; ++row) {
        if (served && served[row] == sh_served) continue;
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            const uint64_t index = uint64_t{row} * g.kv_heads + head;
            const List list = list_of(lists, g, row, head);
            if (list.count == 0) {
                std::fill_n(lse + index * g.group, g.group, -std::numeric_limits<float>::infinity());
                continue;
            }
            units.push_back({row, head, list, split_list(list.count, task_blocks), tasks});
            tasks += units.back().split.tasks;
            blocks += list.count;
        }
    }
    std::vector<float> outs(tasks * partial_out_floats(g)), lses(tasks * g.group);
    AlignedBytes queries(std::max<uint64_t>(1, units.size()) * query_bytes);
    std::atomic<uint64_t> next{0};
    const auto work = [&] {
        std::vector<uint32_t> pages;
        std::vector<uint32_t> masks;
        if (lists.masks) masks.reserve(lists.listed);
        pages.reserve(lists.listed);  // before anything is taken: without memory nothing is lost
        for (uint64_t u; (u = next.fetch_add(1)) < units.size();) {
            const Unit& unit = units[u];
            const uint64_t index = uint64_t{unit.row} * g.kv_heads + unit.head;
            // the caller's query need not be aligned as kernels want it
            char* const query = queries.data + u * query_bytes;
            std::memcpy(query, static_cast<const char*>(lists.query) + index * query_bytes, query_bytes);
            const Partials parts{outs.data() + unit.first_task * partial_out_floats(g),
                                 lses.data() + unit.first_task * g.group};
            float* const unit_out = out + index * partial_out_floats(g);
            float* const unit_lse = lse + index * g.group;
            const bool whole = unit.split.tasks == 1;
            pages.assign(lists.pages + index * lists.listed, lists.pages + index * lists.listed + unit.list.count);
            if (lists.masks) {
                const int32_t* const from = lists.masks + index * lists.listed;
                masks.assign(from, from + unit.list.count);
            }
            for (uint32_t task = 0; task < unit.split.tasks; ++task) {
                BlockAttention attention = attention_of(g, pool, lists.layer, unit.head, query, lists.scale);
                const uint32_t first = task * unit.split.size;
                attention.pages = pages.data() + first;
                attention.masks = lists.masks ? masks.data() + first : nullptr;
                attention.count = std::min(unit.split.size, unit.list.count - first);
                attention.last_fill = task + 1 == unit.split.tasks ? unit.list.last_fill : block_tokens;
                attention.out = whole ? unit_out : parts.out + task * partial_out_floats(g);
                attention.lse = whole ? unit_lse : parts.lse + task * g.group;
                attend(kernel, attention);
            }
            if (!whole) merge_partials(g, parts, unit.split.tasks, unit_out, unit_lse);
        }
    };
    const uint64_t useful = std::min<uint64_t>({threads, units.size(), 1 + blocks / blocks_per_thread});
    const Helpers helpers(useful > 1 ? uint32_t(useful - 1) : 0, [&](uint32_t) {
        try {
            work();
        } catch (const std::bad_alloc&) {  // the others do it
        }
    });
    work();
}

}  // namespace sglang_hybrid
