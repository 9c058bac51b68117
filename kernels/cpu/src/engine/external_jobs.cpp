#include "engine/external_jobs.h"

#include <algorithm>
#include <cstring>

#include "engine/checks.h"

namespace sglang_hybrid {

ExternalJobs::ExternalJobs(void* mailbox, const Geometry& g, uint32_t spin_us)
    : reader(mailbox, g, spin_us), query(g.rows * reader.view.query_row_bytes()), count(uint64_t{g.rows} * g.kv_heads),
      last_fill(count.size()), pages(count.size() * g.max_blocks), masks(g.flags & geometry_masks ? pages.size() : 0),
      weights(g.flags & geometry_value_sums ? pages.size() * g.group * block_tokens : 0), generations_(g.rows), checks_(g.rows),
      wanted_(g.rows), lists_(g.kv_heads) {
    reader.beat();
}

bool ExternalJobs::take(uint64_t timeout_ns) {
    if (reader.wait(timeout_ns, never_, post) != Event::post) return false;
    const uint32_t heads = reader.view.geometry.kv_heads;
    std::fill_n(wanted_.begin(), post.rows, 0);
    std::fill_n(count.begin(), uint64_t{post.rows} * heads, 0);
    for (uint32_t row = 0; row < post.rows; ++row) {
        Request request;
        if (!reader.wait_for_row(post, row, request)) {
            reader.abandoned.fetch_add(1, std::memory_order_relaxed);
            break;
        }
        generations_[row] = request.generation;
        if (request.blocks == 0) {
            reader.reply(post, row, request.generation, ReplyStatus::empty);
        } else if (!read_row(row, request)) {
            std::fill_n(count.begin() + uint64_t{row} * heads, heads, 0);
            reader.reply(post, row, request.generation, ReplyStatus::refused);
        } else {
            wanted_[row] = 1;
        }
    }
    return true;
}

bool ExternalJobs::read_row(uint32_t row, const Request& request) {
    const MailboxView& view = reader.view;
    const Geometry& g = view.geometry;
    if (!reader.read_lists(post, row, request, lists_.data())) return false;
    checks_[row] = check_of_post(post.layer, post.scale, post.kind);
    for (uint32_t head = 0; head < g.kv_heads; ++head) {
        checks_[row] += check_of_list(g, head, lists_[head]);
        const uint64_t index = uint64_t{row} * g.kv_heads + head;
        count[index] = lists_[head].count;
        last_fill[index] = lists_[head].last_fill;
        const uint32_t* const shared = view.pages(post.sequence, row, head);
        uint32_t* const copied = pages.data() + index * g.max_blocks;
        for (uint32_t i = 0; i < lists_[head].count; ++i) {
            copied[i] = __atomic_load_n(&shared[i], __ATOMIC_RELAXED);
            if (copied[i] >= g.pages) return false;
            checks_[row] += check_of_page(g, head, i, copied[i]);
        }
        for (uint32_t i = 0; post.kind == PostKind::attend_masked && i < lists_[head].count; ++i) {
            const uint32_t mask = __atomic_load_n(&view.masks(post.sequence, row, head)[i], __ATOMIC_RELAXED);
            masks[index * g.max_blocks + i] = mask;
            checks_[row] += check_of_mask(g, head, i, mask);
        }
    }
    if (post.kind == PostKind::sum_values) {
        copy_weights(row);
    } else {
        std::memcpy(query.data() + row * view.query_row_bytes(), view.query(post.sequence, row, 0), view.query_row_bytes());
    }
    return true;
}

void ExternalJobs::copy_weights(uint32_t row) {
    const MailboxView& view = reader.view;
    for (uint32_t head = 0; head < view.geometry.kv_heads; ++head) {
        const float* from = view.weights(post.sequence, row, head);
        const uint64_t index = uint64_t{row} * view.geometry.kv_heads + head, stride = view.weight_stride();
        float* to = weights.data() + index * view.geometry.group * stride;
        for (uint32_t i = 0; i < view.geometry.group; ++i, from += stride, to += stride) {
            std::copy_n(from, uint64_t{lists_[head].count} * block_tokens, to);
        }
    }
}

void ExternalJobs::answer(const float* out, const float* lse) {
    const MailboxView& view = reader.view;
    for (uint32_t row = 0; row < post.rows; ++row) {
        if (!wanted_[row]) continue;
        std::copy_n(out + row * view.output_row(), view.output_row(), view.output(post.sequence, row, 0));
        std::copy_n(lse + row * view.lse_row(), view.lse_row(), view.lse(post.sequence, row, 0));
        reader.reply(post, row, generations_[row], ReplyStatus::answered, checks_[row]);
        for (uint32_t head = 0; head < view.geometry.kv_heads; ++head) blocks += count[row * view.geometry.kv_heads + head];
    }
    reader.complete(post);
}

}  // namespace sglang_hybrid
