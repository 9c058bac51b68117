#include "engine/post_reader.h"

#include <sched.h>

#include <algorithm>
#include <cmath>

#include "engine/flags.h"

namespace sglang_hybrid {
namespace {

constexpr uint64_t beat_ns = 100'000'000;         // more than twice as often as the mailbox promises
// Of a post's rows. A client writes them in microseconds, but its thread may be stopped meanwhile. Not longer, because an engine
// that must stop ends its post first.
constexpr uint64_t rows_timeout_ns = 1'000'000'000;
constexpr uint32_t looks_per_clock = 64;  // reading the clock costs more than reading the bell

}  // namespace

PostReader::PostReader(void* mailbox, const Geometry& geometry, uint32_t spin_us)
    : view(mailbox, geometry), spin_ns_(uint64_t{spin_us} * 1000),
      next_(std::min(load_acquire(view.worker().completed), last_sequence) + 1), wake_seen_(load_acquire(view.client().wake)) {}

uint64_t PostReader::newest() const {
    const uint64_t posted = load_ordered(view.bell().posted);
    return posted <= last_sequence ? posted : 0;
}

bool PostReader::take(OpenPost& post) {
    const uint64_t posted = newest();
    // Sequence numbers only grow. If the bell's number shrinks, the larger number was damage, and waiting for it would
    // skip all posts below it.
    if (posted && posted + 1 < next_) next_ = posted;
    if (posted < next_) return false;
    // posts more than one behind the newest are overwritten: the client has given up on them
    const uint64_t oldest = posted - (mailbox_slots - 1);
    if (posted >= mailbox_slots && oldest > next_) {
        abandoned.fetch_add(oldest - next_ - 1, std::memory_order_relaxed);
        abandon(oldest - 1);
        next_ = oldest;
    }
    const uint64_t sequence = next_;
    if (read(post)) return true;
    ++next_;
    abandon(sequence);
    return false;
}

bool PostReader::take_next(OpenPost& post) {
    const uint64_t posted = newest();
    return posted >= next_ && posted < next_ + mailbox_slots && read(post);
}

bool PostReader::is_served(uint32_t kind) const {
    switch (static_cast<PostKind>(kind)) {
        case PostKind::attend: return true;
        case PostKind::attend_masked: return view.geometry.flags & geometry_masks;
        case PostKind::sum_values: return view.geometry.flags & geometry_value_sums;
    }
    return false;
}

bool PostReader::read(OpenPost& post) {
    const Post& shared = view.post(next_);
    if (load_acquire(shared.sequence) != next_) return false;
    post.sequence = next_;
    post.layer = load_acquire(shared.layer);
    post.rows = load_acquire(shared.rows);
    const float scale = shared.scale;
    post.scale = scale;
    const uint32_t kind = load_acquire(shared.kind);
    post.kind = static_cast<PostKind>(kind);
    post.arrived_ns = now_ns();
    stay_awake(post.arrived_ns);
    if (post.rows > view.geometry.rows || post.layer >= view.geometry.layers) return false;
    if (!std::isfinite(scale) || !is_served(kind)) return false;
    ++next_;
    if (post.arrived_ns - last_beat_ns_ >= beat_ns) beat();
    return true;
}

void PostReader::abandon(uint64_t sequence) {
    abandoned.fetch_add(1, std::memory_order_relaxed);
    store_ordered(view.worker().completed, sequence);
}

Event PostReader::wait(uint64_t timeout_ns, const std::atomic<bool>& stop, OpenPost& post) {
    const uint64_t deadline = now_ns() + timeout_ns;
    for (;;) {
        for (uint32_t look = 0; look < looks_per_clock; ++look) {
            if (take(post)) return Event::post;
            pause_core();
        }
        sched_yield();
        if (stop.load(std::memory_order_relaxed)) return Event::none;
        const uint64_t now = now_ns();
        if (now - last_beat_ns_ >= beat_ns) beat();
        if (now >= deadline) return Event::none;
        const uint32_t wake = load_acquire(view.client().wake);
        if (wake != wake_seen_) {
            wake_seen_ = wake;
            stay_awake(now);
            return Event::near;
        }
        if (now < awake_until_ns()) continue;

        store_ordered(view.worker().parked, 1u);
        if (newest() < next_) {
            parks.fetch_add(1, std::memory_order_relaxed);
            sleep_on(view.client().wake, wake_seen_, std::min(beat_ns, deadline - now));
        }
        store_ordered(view.worker().parked, 0u);
    }
}

Arrival PostReader::look_for_row(const OpenPost& post, uint32_t row, Request& request) {
    const Request& shared = view.request(post.sequence, row);
    const auto is_there = [&] { return load_acquire(shared.sequence) == post.sequence; };
    if (!is_there()) {
        const bool late = now_ns() > post.arrived_ns + rows_timeout_ns || newest() >= post.sequence + mailbox_slots;
        if (!late) return Arrival::awaited;
        // check again: this thread may have been stopped after the first check for longer than the client needed
        if (!is_there()) return Arrival::late;
    }
    request.sequence = post.sequence;
    request.generation = load_acquire(shared.generation);
    request.blocks = load_acquire(shared.blocks);
    return Arrival::there;
}

bool PostReader::wait_for_row(const OpenPost& post, uint32_t row, Request& request) {
    for (uint32_t looks = 1;; ++looks) {
        const Arrival arrival = look_for_row(post, row, request);
        if (arrival != Arrival::awaited) return arrival == Arrival::there;
        pause_core();
        if (looks % looks_per_clock == 0) sched_yield();
    }
}

bool PostReader::read_lists(const OpenPost& post, uint32_t row, const Request& request, List* lists) const {
    const List* const shared = view.lists(post.sequence, row);
    uint64_t blocks = 0;
    for (uint32_t head = 0; head < view.geometry.kv_heads; ++head) {
        const List list{load_acquire(shared[head].count), load_acquire(shared[head].last_fill)};
        if (list.count > view.geometry.max_blocks) return false;
        if (list.count && (list.last_fill < 1 || list.last_fill > block_tokens)) return false;
        blocks += list.count;
        lists[head] = list;
    }
    return blocks == request.blocks;
}

void PostReader::reply(const OpenPost& post, uint32_t row, uint32_t generation, ReplyStatus status, uint64_t check) {
    store_release(view.check(post.sequence, row), check);
    Reply& shared = view.reply(post.sequence, row);
    store_release(shared.generation, generation);
    store_release(shared.status, static_cast<uint32_t>(status));
    store_release(shared.sequence, post.sequence);
    (status == ReplyStatus::refused ? refused : rows).fetch_add(1, std::memory_order_relaxed);
}

void PostReader::complete(const OpenPost& post) {
    posts.fetch_add(1, std::memory_order_relaxed);
    const uint64_t now = now_ns();
    busy_ns.fetch_add(now - std::max(post.arrived_ns, completed_ns_), std::memory_order_relaxed);
    completed_ns_ = now;
    stay_awake(now);
    store_ordered(view.worker().completed, post.sequence);
    if (load_ordered(view.client().waiting)) wake_all(view.worker().done);
}

void PostReader::beat() {
    last_beat_ns_ = now_ns();
    store_release(view.worker().heartbeat, load_acquire(view.worker().heartbeat) + 1);
}

}  // namespace sglang_hybrid
