#include "engine/mailbox_client.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/checks.h"
#include "engine/flags.h"

namespace sglang_hybrid {
namespace {

constexpr uint64_t spin_ns = 100'000;    // then sleep: the worker may need this core
constexpr uint64_t short_spin_ns = 10'000;  // spin time after a post that took longer than spin_ns: the next may too
constexpr uint64_t doze_ns = 2'000'000;  // most time until a sleeping client notices that the worker is gone
constexpr uint32_t looks_per_clock = 64;

uint64_t entry_of(const sh_lists& lists, const Geometry& g, uint32_t row, uint32_t head) {
    return (uint64_t{row} * g.kv_heads + head) * lists.listed;
}

PostKind kind_of(const sh_lists& lists) {
    if (lists.weights) return PostKind::sum_values;
    return lists.masks ? PostKind::attend_masked : PostKind::attend;
}

}  // namespace

List list_of(const sh_lists& lists, const Geometry& g, uint32_t row, uint32_t head) {
    const uint64_t first = entry_of(lists, g, row, head);
    List list{0, block_tokens};
    while (list.count < lists.listed && lists.pages[first + list.count] >= 0) ++list.count;
    if (list.count && !lists.weights) list.last_fill = uint32_t(lists.fill[first + list.count - 1]);
    return list;
}

std::string problem_of(const sh_lists& lists, const Geometry& g) {
    if (lists.rows > g.rows) return std::to_string(lists.rows) + " rows, at most " + std::to_string(g.rows) + " fit";
    if (lists.layer >= g.layers) return "layer " + std::to_string(lists.layer) + " of " + std::to_string(g.layers);
    for (uint32_t row = 0; row < lists.rows; ++row) {
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            const auto where = [&] { return " (row " + std::to_string(row) + ", KV head " + std::to_string(head) + ")"; };
            const uint64_t first = entry_of(lists, g, row, head);
            const List list = list_of(lists, g, row, head);
            if (list.count > g.max_blocks) {
                return std::to_string(list.count) + " blocks, at most " + std::to_string(g.max_blocks) + " fit" + where();
            }
            for (uint32_t i = 0; i < lists.listed; ++i) {
                const int64_t page = lists.pages[first + i],
                              fill = lists.weights ? int64_t{block_tokens} : lists.fill[first + i];
                if (i >= list.count) {
                    if (page >= 0) return "a block behind the end of its list" + where();
                    continue;
                }
                if (page >= int64_t{g.pages}) {
                    return "page " + std::to_string(page) + " of " + std::to_string(g.pages) + where();
                }
                const bool last = i + 1 == list.count;
                if (fill < 1 || fill > int64_t{block_tokens} || (!last && fill != int64_t{block_tokens})) {
                    return std::to_string(fill) + " tokens in a block: 32, or 1 to 32 in the last one" + where();
                }
            }
        }
    }
    return {};
}

uint64_t MailboxClient::post(const sh_lists& lists, uint32_t generation) {
    const uint64_t sequence = ++posted_;
    auto& own = posts_[sequence % mailbox_slots];
    own.sequence = sequence;
    own.rows = lists.rows;
    own.generation = generation;
    own.checks.assign(lists.rows, 0);
    // what the reply holds now is no reply to this post, whatever its sequence number
    for (uint32_t row = 0; row < lists.rows; ++row) store_release(view.reply(sequence, row).sequence, 0);
    Post& post = view.post(sequence);
    store_release(post.layer, lists.layer);
    store_release(post.rows, lists.rows);
    post.scale = lists.scale;
    store_release(post.kind, static_cast<uint32_t>(kind_of(lists)));
    store_release(post.sequence, sequence);
    // ring the bell before writing rows: the worker computes the first row while the client writes the others
    store_ordered(view.bell().posted, sequence);
    if (load_ordered(view.worker().parked)) wake_all(view.client().wake);
    for (uint32_t row = 0; row < lists.rows; ++row) write_request(lists, sequence, row, generation);
    return sequence;
}

void MailboxClient::write_request(const sh_lists& lists, uint64_t sequence, uint32_t row, uint32_t generation) {
    const Geometry& g = view.geometry;
    const PostKind kind = kind_of(lists);
    uint32_t blocks = 0;
    for (uint32_t head = 0; head < g.kv_heads; ++head) {
        lists_[head] = list_of(lists, g, row, head);
        blocks += lists_[head].count;
    }
    if (blocks) {
        uint64_t& check = posts_[sequence % mailbox_slots].checks[row] = check_of_post(lists.layer, lists.scale, kind);
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            const List list = lists_[head];
            check += check_of_list(g, head, list);
            const int64_t* const from = lists.pages + entry_of(lists, g, row, head);
            uint32_t* const to = view.pages(sequence, row, head);
            for (uint32_t i = 0; i < list.count; ++i) {
                __atomic_store_n(&to[i], uint32_t(from[i]), __ATOMIC_RELAXED);
                check += check_of_page(g, head, i, uint32_t(from[i]));
            }
            if (kind == PostKind::sum_values && list.count) write_weights(lists, sequence, row, head, list.count);
            for (uint32_t i = 0; kind == PostKind::attend_masked && i < list.count; ++i) {
                const auto mask = uint32_t(lists.masks[entry_of(lists, g, row, head) + i]);
                __atomic_store_n(&view.masks(sequence, row, head)[i], mask, __ATOMIC_RELAXED);
                check += check_of_mask(g, head, i, mask);
            }
            store_release(view.lists(sequence, row)[head].count, list.count);
            store_release(view.lists(sequence, row)[head].last_fill, list.last_fill);
        }
        if (kind != PostKind::sum_values) {
            const char* const from = static_cast<const char*>(lists.query) + row * view.query_row_bytes();
            std::memcpy(view.query(sequence, row, 0), from, view.query_row_bytes());
        }
    }
    Request& request = view.request(sequence, row);
    store_release(request.generation, generation);
    store_release(request.blocks, blocks);
    store_release(request.sequence, sequence);
}

void MailboxClient::write_weights(const sh_lists& lists, uint64_t sequence, uint32_t row, uint32_t head, uint32_t count) {
    const uint64_t stride = uint64_t{lists.listed} * block_tokens;
    const float* from = lists.weights + (uint64_t{row} * view.geometry.kv_heads + head) * view.geometry.group * stride;
    float* to = view.weights(sequence, row, head);
    for (uint32_t i = 0; i < view.geometry.group; ++i, from += stride, to += view.weight_stride()) {
        std::memcpy(to, from, uint64_t{count} * block_tokens * sizeof(float));
    }
}

bool MailboxClient::is_settled(uint64_t sequence, uint32_t row) const {
    // a larger number is damage, since a later post does not exist yet, and waiting would not repair the damage
    return load_acquire(view.reply(sequence, row).sequence) >= sequence;
}

bool MailboxClient::copy_row(uint64_t sequence, uint32_t row, float* out, float* lse) const {
    // The output is in the caches of the worker's cores. A copy would wait for each line, so the next row is prefetched
    // during this row's copy, if the worker has finished writing the next row.
    const bool next_is_there = row + 1 < posts_[sequence % mailbox_slots].rows && is_settled(sequence, row + 1);
    const char* const next = reinterpret_cast<const char*>(view.output(sequence, row, 0) + view.output_row());
    const uint64_t head_bytes = view.geometry.head_dim * sizeof(float);
    const Reply& reply = view.reply(sequence, row);
    if (load_acquire(reply.sequence) != sequence) return false;
    if (load_acquire(reply.generation) != posts_[sequence % mailbox_slots].generation) return false;
    const auto status = static_cast<ReplyStatus>(load_acquire(reply.status));
    out += row * view.output_row();
    lse += row * view.lse_row();
    const uint64_t expected = posts_[sequence % mailbox_slots].checks[row];
    if (load_acquire(view.check(sequence, row)) != expected) return false;
    if (status == ReplyStatus::empty && expected == 0) {
        std::fill_n(lse, view.lse_row(), -std::numeric_limits<float>::infinity());
        return true;
    }
    if (status != ReplyStatus::answered) return false;
    std::copy_n(view.lse(sequence, row, 0), view.lse_row(), lse);
    for (uint64_t head = 0; head < view.lse_row(); ++head) {
        if (next_is_there) {
            constexpr uint64_t line = 64;
            for (uint64_t at = 0; at < head_bytes; at += line) __builtin_prefetch(next + head * head_bytes + at, 0, 2);
        }
        if (lse[head] == -std::numeric_limits<float>::infinity()) continue;
        const uint64_t first = head * view.geometry.head_dim;
        std::copy_n(view.output(sequence, row, 0) + first, view.geometry.head_dim, out + first);
    }
    return true;
}

uint32_t MailboxClient::collect(uint64_t sequence, uint32_t rows, uint64_t timeout_ns, const uint32_t* gone, float* out,
                                float* lse, uint8_t* served) {
    const auto& post = posts_[sequence % mailbox_slots];
    // the replies of the post that has the slot now are for other lists, and may have more rows than the caller's arrays
    if (post.sequence != sequence || post.rows != rows) {
        std::fill_n(served, rows, sh_overwritten);
        return rows;
    }
    const uint64_t start = now_ns();
    uint32_t missing = 0;
    const auto settle = [&](uint32_t row) {
        served[row] = copy_row(sequence, row, out, lse) ? sh_served : sh_damaged;
        missing += served[row] != sh_served;
    };
    // on a core shared with the worker, spinning delays the worker
    const uint64_t spin = outlasted_spinning_ ? short_spin_ns : spin_ns;
    uint32_t row = 0;  // rows before this one are settled and copied, while the worker computes the others
    while (row < post.rows) {
        for (uint32_t look = 0; look < looks_per_clock && row < post.rows; ++look) {
            for (; row < post.rows && is_settled(sequence, row); ++row) settle(row);
            if (row < post.rows) pause_core();
        }
        const uint64_t waited = now_ns() - start;
        if (row == post.rows || (gone && load_acquire(*gone)) || waited >= timeout_ns) break;
        if (waited < spin) continue;
        const uint32_t seen = load_acquire(view.worker().done);
        store_ordered(view.client().waiting, 1u);
        if (load_ordered(view.worker().completed) < sequence) {
            sleep_on(view.worker().done, seen, std::min(doze_ns, timeout_ns - waited));
        }
        store_ordered(view.client().waiting, 0u);
    }
    outlasted_spinning_ = now_ns() - start >= spin_ns;
    for (; row < post.rows; ++row) {
        if (is_settled(sequence, row)) {
            settle(row);
        } else {
            served[row] = sh_late;
            ++missing;
        }
    }
    return missing;
}

void MailboxClient::wake() { wake_all(view.client().wake); }

}  // namespace sglang_hybrid
