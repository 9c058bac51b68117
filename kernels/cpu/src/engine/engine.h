// The worker's threads. One of them, the lead, waits for posts and opens their rows; all of them compute.
//
// Two posts can be under way, one in each slot of the mailbox: tasks of the newer one are taken when the older one has
// none left, so that nobody waits for its last ones to be computed. A slot's next post is not begun before everything of
// the one before is done, and posts become complete in their order.
//
// Threads form groups. Group n begins with row n, then n + groups, and so on: one sequence at a time, so that its blocks
// share a cache. A thread that finds no task in the rows of its group takes one of any other row, so that one long
// sequence does not hold up a layer. Rows are opened as they arrive, and replied to one by one as they finish.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/post_reader.h"
#include "engine/tasks.h"

namespace sglang_hybrid {

struct EngineOptions {
    uint32_t threads;
    uint32_t group_threads;
    uint32_t task_blocks;
    uint32_t spin_us;
    std::vector<int32_t> cores;  // of each thread; empty: not bound
};

class Engine {
  public:
    Engine(void* mailbox, const char* pool, const Geometry& geometry, const EngineOptions& options, Kernels kernels);
    ~Engine();
    Engine(const Engine&) = delete;

    // Of one thread, on a cache line of its own: written after every task.
    struct alignas(128) Counts {
        std::atomic<uint64_t> blocks{0}, tasks{0}, stolen{0};
    };
    struct Sums {
        uint64_t blocks = 0, tasks = 0, stolen = 0;
    };
    Sums sums() const;
    uint32_t threads() const { return uint32_t(threads_.size()); }  // those that could be started

    PostReader reader;

  private:
    struct Head {
        List list;
        Split split;
        uint32_t first_task;
        std::atomic<uint32_t> tasks_left;
    };
    // Written by the lead before the ticket is, and then left alone until every task of the row is done.
    struct alignas(128) Row {
        // Tasks to do in the upper half, tasks given out in the lower. Whoever adds to it owns as many tasks.
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint32_t> tasks_left{0};
        std::atomic<bool> out_of_bounds{false};
        std::atomic<uint64_t> check{0};  // of what was used so far
        uint32_t generation = 0;
        std::unique_ptr<Head[]> heads;
    };
    // The post in one slot of the mailbox.
    struct Slot {
        OpenPost post;  // written by the lead while there are no tasks
        std::vector<Row> rows;
        Partials partials;
        bool answered = false;  // guarded by completing_
        // counts the posts that were begun, from 1: a client's numbers may come again when its bell was damaged
        alignas(128) std::atomic<uint64_t> serial{0};
        std::atomic<uint32_t> open_rows{0};  // so many rows can be searched for tasks
        alignas(128) std::atomic<uint32_t> rows_left{0};  // opened and not replied to; one more while rows are opened
    };

    // A task that a thread has claimed, ready to be computed.
    struct Claimed {
        Slot* slot;
        uint32_t row, head;
        uint32_t finished;  // tasks of the row that are done with this one
        bool in_bounds, whole;
        uint64_t check;  // of its pages and masks
        std::vector<uint32_t> pages, masks;
        BlockAttention attention;
        ValueSum sum;  // instead, where values are summed
    };
    // Neighbouring tasks of one row, taken at once: what threads share is touched once for all of them.
    struct Batch {
        Slot* slot = nullptr;
        uint32_t row = 0, first = 0, next = 0, end = 0;
        bool is_empty() const { return next == end; }
    };
    // What one thread has to itself.
    struct Hands {
        Hands(const Engine& engine, uint32_t thread);
        const uint32_t thread, group;
        Batch batch, following;
        Claimed tasks[2];
        Claimed* current = &tasks[0];
        Claimed* next = &tasks[1];
        bool claimed = false;  // `current` is
        // Where it looks for tasks of a post: of each group, the rows before this one have none left.
        struct Search {
            uint64_t serial = 0;
            std::vector<uint32_t> rows;
        } searches[mailbox_slots];
    };

    void lead();
    void help(uint32_t thread);
    void begin(const OpenPost& post);
    bool open_what_is_there();
    void open(Slot& slot, uint32_t row, const Request& request);
    void close_row(Slot& slot);
    bool take_batch(Hands& hands, Batch& batch);
    bool take_batch_of(Slot& slot, Hands& hands, Batch& batch);
    void request_lists(const Batch& batch) const;
    int32_t share_of_unclaimed() const;
    bool claim_next(Hands& hands, Claimed& claimed);
    void prepare(const Batch& batch, Claimed& claimed) const;
    bool compute_one(Hands& hands);
    void compute(Claimed& claimed, const Claimed* next, uint32_t thread);
    void pause();
    void rouse_helpers();
    Partials partials_of(const Slot& slot, uint32_t row, uint32_t task) const;
    void start_threads();

    const Geometry geometry_;
    const char* const pool_;
    const EngineOptions options_;
    const Kernels kernels_;
    const uint32_t groups_;
    const uint32_t tasks_per_row_;  // at most, with guards

    Slot slots_[mailbox_slots];
    std::vector<Counts> counts_;  // of each thread
    float* scratch_ = nullptr;
    uint64_t scratch_bytes_ = 0;
    // the lead's
    std::vector<List> lists_;
    Slot* opening_ = nullptr;  // its rows are being opened
    uint32_t next_row_ = 0;    // of it
    uint64_t begun_ = 0;       // posts
    std::mutex completing_;
    uint64_t newest_ = 0;  // post that was begun; written by the lead, guarded by completing_ for the others
    // what threads write, apart from what they only read and from each other
    alignas(128) std::atomic<uint64_t> oldest_{1};     // post that is not complete; newest_ + 1 where all are
    alignas(128) std::atomic<int32_t> unclaimed_{0};   // tasks that somebody could take
    alignas(128) std::atomic<uint32_t> asleep_{0};     // helpers
    uint32_t rouse_ = 0;                               // futex of sleeping helpers

    alignas(128) std::atomic<bool> stop_{false};
    std::atomic<bool> is_alive_{false};  // the lead
    std::vector<std::thread> threads_;
};

}  // namespace sglang_hybrid
