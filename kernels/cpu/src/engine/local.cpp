// The worker's computation in the calling process, for rows that the worker did not answer in time.
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

constexpr uint32_t blocks_per_thread = 64;  // with fewer blocks, starting a thread costs more time than it saves

// One (row, KV head) that has blocks.
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

// The (row, KV head) pairs with blocks, in order, of all rows that are not served, and their total tasks and blocks.
struct Units {
    std::vector<Unit> units;
    uint64_t tasks = 0, blocks = 0;

    // Calls empty(index) for each pair without blocks, where index is row * KV heads + head.
    template <class Empty>
    Units(const sh_lists& lists, const Geometry& g, uint32_t task_blocks, const uint8_t* served, Empty empty) {
        for (uint32_t row = 0; row < lists.rows; ++row) {
            if (served && served[row] == sh_served) continue;
            for (uint32_t head = 0; head < g.kv_heads; ++head) {
                const List list = list_of(lists, g, row, head);
                if (list.count == 0) {
                    empty(uint64_t{row} * g.kv_heads + head);
                    continue;
                }
                units.push_back({row, head, list, split_list(list.count, task_blocks), tasks});
                tasks += units.back().split.tasks;
                blocks += list.count;
            }
        }
    }

    // Call work() in up to `threads` threads, the calling one included. work() takes units until none are left.
    template <class Work>
    void share(uint32_t threads, Work work) const {
        const uint64_t useful = std::min<uint64_t>({threads, units.size(), 1 + blocks / blocks_per_thread});
        const Helpers helpers(useful > 1 ? uint32_t(useful - 1) : 0, [&](uint32_t) {
            try {
                work();
            } catch (const std::bad_alloc&) {  // the other threads take the units
            }
        });
        work();
    }
};

// Pages and masks of one unit in the types that kernels take.
class UnitLists {
  public:
    // Allocates all memory before a thread takes its first unit, so that no unit is lost if memory runs out.
    explicit UnitLists(const sh_lists& lists) : lists_(lists) {
        pages_.reserve(lists.listed);
        if (lists.masks) masks_.reserve(lists.listed);
    }

    // Copy the lists of unit row * KV heads + head = `index`.
    void read(uint64_t index, uint32_t count) {
        const int64_t* const pages = lists_.pages + index * lists_.listed;
        pages_.assign(pages, pages + count);
        if (!lists_.masks) return;
        const int32_t* const masks = lists_.masks + index * lists_.listed;
        masks_.assign(masks, masks + count);
    }

    // Point `attention` at the unit's blocks from `first` on.
    void give(BlockAttention& attention, uint32_t first) const {
        attention.pages = pages_.data() + first;
        attention.masks = lists_.masks ? masks_.data() + first : nullptr;
    }

  private:
    const sh_lists& lists_;
    std::vector<uint32_t> pages_, masks_;
};

}  // namespace

void attend_local(const char* pool, const Geometry& g, const sh_lists& lists, uint32_t task_blocks, uint32_t threads,
                  const uint8_t* served, float* out, float* lse, Kernels kernels) {
    const uint64_t query_bytes = partial_out_floats(g) * query_bytes_of(static_cast<DType>(g.dtype));
    const Units all(lists, g, task_blocks, served, [&](uint64_t index) {
        std::fill_n(lse + index * g.group, g.group, -std::numeric_limits<float>::infinity());
    });
    std::vector<float> outs(all.tasks * partial_out_floats(g)), lses(all.tasks * g.group);
    AlignedBytes queries(std::max<uint64_t>(1, all.units.size()) * query_bytes);
    std::atomic<uint64_t> next{0};
    all.share(threads, [&] {
        UnitLists listed(lists);
        for (uint64_t u; (u = next.fetch_add(1)) < all.units.size();) {
            const Unit& unit = all.units[u];
            const uint64_t index = uint64_t{unit.row} * g.kv_heads + unit.head;
            // the caller's query may not have the alignment that kernels need
            char* const query = queries.data + u * query_bytes;
            if (!lists.weights) std::memcpy(query, static_cast<const char*>(lists.query) + index * query_bytes, query_bytes);
            const Partials parts{outs.data() + unit.first_task * partial_out_floats(g),
                                 lses.data() + unit.first_task * g.group};
            float* const unit_out = out + index * partial_out_floats(g);
            float* const unit_lse = lse + index * g.group;
            const bool whole = unit.split.tasks == 1;
            listed.read(index, unit.list.count);
            for (uint32_t task = 0; task < unit.split.tasks; ++task) {
                BlockAttention attention = attention_of(g, pool, lists.layer, unit.head, query, lists.scale);
                const uint32_t first = task * unit.split.size;
                listed.give(attention, first);
                attention.count = std::min(unit.split.size, unit.list.count - first);
                attention.last_fill = task + 1 == unit.split.tasks ? unit.list.last_fill : block_tokens;
                attention.out = whole ? unit_out : parts.out + task * partial_out_floats(g);
                attention.lse = whole ? unit_lse : parts.lse + task * g.group;
                if (lists.weights) {
                    const uint64_t stride = uint64_t{lists.listed} * block_tokens;
                    const float* const weights = lists.weights + index * g.group * stride + uint64_t{first} * block_tokens;
                    kernels.sum(sum_of(attention, weights, stride));
                } else {
                    attend(kernels.attend, attention);
                }
            }
            if (lists.weights) {
                std::fill_n(unit_lse, g.group, 0.0f);
                if (!whole) add_partial_sums(g, parts, unit.split.tasks, unit_out);
            } else if (!whole) {
                merge_partials(g, parts, unit.split.tasks, unit_out, unit_lse);
            }
        }
    });
}

void token_weights(const char* pool, const Geometry& g, const sh_lists& lists, uint32_t threads, const float* lse,
                   float* weights, WeightKernel kernel) {
    const uint64_t query_bytes = partial_out_floats(g) * query_bytes_of(static_cast<DType>(g.dtype));
    const uint64_t stride = uint64_t{lists.listed} * block_tokens;  // from a head's weights to the next head's
    const Units all(lists, g, std::max(1u, lists.listed), nullptr,
                    [&](uint64_t index) { std::fill_n(weights + index * g.group * stride, g.group * stride, 0.0f); });
    std::atomic<uint64_t> next{0};
    all.share(threads, [&] {
        UnitLists listed(lists);
        AlignedBytes query(query_bytes);
        for (uint64_t u; (u = next.fetch_add(1)) < all.units.size();) {
            const Unit& unit = all.units[u];
            const uint64_t index = uint64_t{unit.row} * g.kv_heads + unit.head;
            std::memcpy(query.data, static_cast<const char*>(lists.query) + index * query_bytes, query_bytes);
            float unit_lse[max_group];
            std::copy_n(lse + index * g.group, g.group, unit_lse);
            listed.read(index, unit.list.count);
            BlockAttention attention = attention_of(g, pool, lists.layer, unit.head, query.data, lists.scale);
            listed.give(attention, 0);
            attention.count = unit.list.count;
            attention.last_fill = unit.list.last_fill;
            attention.lse = unit_lse;
            float* const unit_weights = weights + index * g.group * stride;
            kernel(attention, unit_weights, stride);
            const uint64_t used = uint64_t{unit.list.count} * block_tokens;
            for (uint32_t head = 0; head < g.group; ++head) {
                std::fill_n(unit_weights + head * stride + used, stride - used, 0.0f);
            }
        }
    });
}

}  // namespace sglang_hybrid
