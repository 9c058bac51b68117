// The worker's side of the mailbox: waits for posts, hands them out checked, writes replies. One thread waits and opens;
// replies may be written by any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/mailbox_view.h"

namespace sglang_hybrid {

// Posts are counted from 1: no client gets further than this, and sums with a few slots do not overflow below it.
inline constexpr uint64_t last_sequence = UINT64_MAX / 2;

// The fields of a post, copied out of shared memory.
struct OpenPost {
    uint64_t sequence = 0;
    uint32_t layer = 0;
    uint32_t rows = 0;
    float scale = 0;
    PostKind kind = PostKind::attend;
    uint64_t arrived_ns = 0;
};

enum class Event {
    post,   // there is one
    near,   // the client says that there will be one soon
    none,
};

enum class Arrival { there, awaited, late };

class PostReader {
  public:
    PostReader(void* mailbox, const Geometry& geometry, uint32_t spin_us);

    // Wait for the next post, until `timeout_ns` are over or `stop` is set. Spins for as long as work was near recently,
    // sleeps otherwise. All waiting yields now and then: the client, which is waited for, may share the core.
    Event wait(uint64_t timeout_ns, const std::atomic<bool>& stop, OpenPost& post);

    // Take the post after the last one, if it is there already and nothing is wrong with it. Posts before it may still be
    // under way: what is wrong is left to wait(), which is called when all of them are complete.
    bool take_next(OpenPost& post);

    // Row's request, if it is there. Late: it never came, or a newer post took its place.
    Arrival look_for_row(const OpenPost& post, uint32_t row, Request& request);

    // Wait until row's request is there. False: it is late.
    bool wait_for_row(const OpenPost& post, uint32_t row, Request& request);

    // Copy a row's lists to `lists` [KV heads]. False: they are out of bounds.
    bool read_lists(const OpenPost& post, uint32_t row, const Request& request, List* lists) const;

    // `check`: of what an answered row was computed from
    void reply(const OpenPost& post, uint32_t row, uint32_t generation, ReplyStatus status, uint64_t check = 0);

    // Every row of the post is answered or given up, and every post before it is complete. One thread at a time.
    void complete(const OpenPost& post);

    void beat();  // "the worker lives"

    // Spinning is worth it until then, for helper threads too.
    uint64_t awake_until_ns() const { return awake_until_.load(std::memory_order_relaxed); }

    const MailboxView view;
    std::atomic<uint64_t> posts{0}, abandoned{0}, rows{0}, refused{0}, busy_ns{0}, parks{0};

  private:
    bool is_served(uint32_t kind) const;
    uint64_t newest() const;  // post; 0 where the bell shows a number that no client gets to
    bool take(OpenPost& post);
    bool read(OpenPost& post);
    void abandon(uint64_t sequence);
    void stay_awake(uint64_t now) { awake_until_.store(now + spin_ns_, std::memory_order_relaxed); }

    const uint64_t spin_ns_;
    uint64_t next_;
    uint32_t wake_seen_;
    uint64_t last_beat_ns_ = 0;
    uint64_t row_deadline_ns_ = 0;  // of the row that is looked for; 0: it was not missed yet
    uint64_t completed_ns_ = 0;     // when the last post was
    std::atomic<uint64_t> awake_until_{0};
};

}  // namespace sglang_hybrid
