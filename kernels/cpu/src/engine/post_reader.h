// The worker's side of the mailbox: waits for posts, checks and returns them, writes replies. One thread waits for posts and
// rows; any thread may write replies.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/mailbox_view.h"

namespace sglang_hybrid {

// The highest valid sequence number. Posts are counted from 1, so no client reaches it; adding a few slots cannot overflow.
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
    post,   // a post arrived
    near,   // the client announced that a post follows soon
    none,
};

// The state of a row's request: arrived, not yet arrived, or given up.
enum class Arrival { there, awaited, late };

class PostReader {
  public:
    PostReader(void* mailbox, const Geometry& geometry, uint32_t spin_us);

    // Wait for the next post until `timeout_ns` have passed or `stop` is set. Spins for the spin time after the last post
    // or wake, sleeps otherwise. Spinning yields regularly, since the client may share the core.
    Event wait(uint64_t timeout_ns, const std::atomic<bool>& stop, OpenPost& post);

    // Take the next post if it has arrived and is valid. Returns at once. Earlier posts may still be under way, so an
    // invalid post is left to wait(), which is called when all earlier posts are complete.
    bool take_next(OpenPost& post);

    // Read a row's request if it has arrived. Late: it did not arrive in time, or a newer post overwrote its slot.
    Arrival look_for_row(const OpenPost& post, uint32_t row, Request& request);

    // Wait until a row's request has arrived. False: it is late.
    bool wait_for_row(const OpenPost& post, uint32_t row, Request& request);

    // Copy the lengths of a row's lists to `lists` [KV heads]. False: they are out of bounds.
    bool read_lists(const OpenPost& post, uint32_t row, const Request& request, List* lists) const;

    // Write the reply of a row. `check`: checksum of what an answered row was computed from.
    void reply(const OpenPost& post, uint32_t row, uint32_t generation, ReplyStatus status, uint64_t check = 0);

    // Mark the post as completed and wake the client. Every row of the post must be answered or given up, and every
    // earlier post must be complete. One thread at a time.
    void complete(const OpenPost& post);

    void beat();  // increment the heartbeat in the mailbox

    // The time until which threads should spin rather than sleep, helper threads too.
    uint64_t awake_until_ns() const { return awake_until_.load(std::memory_order_relaxed); }

    const MailboxView view;
    std::atomic<uint64_t> posts{0}, abandoned{0}, rows{0}, refused{0}, busy_ns{0}, parks{0};

  private:
    bool is_served(uint32_t kind) const;
    uint64_t newest() const;  // sequence number on the bell; 0 if it is above last_sequence
    bool take(OpenPost& post);
    bool read(OpenPost& post);
    void abandon(uint64_t sequence);
    void stay_awake(uint64_t now) { awake_until_.store(now + spin_ns_, std::memory_order_relaxed); }

    const uint64_t spin_ns_;
    uint64_t next_;       // sequence number of the next post to take
    uint32_t wake_seen_;  // ClientLine.wake when last read
    uint64_t last_beat_ns_ = 0;
    uint64_t completed_ns_ = 0;  // time at which the last post was completed
    std::atomic<uint64_t> awake_until_{0};
};

}  // namespace sglang_hybrid
