// The worker's threads. One thread, the lead, waits for posts and opens their rows, which splits them into tasks. All threads
// compute tasks.
//
// Two posts can be under way, one in each slot of the mailbox. Threads take tasks of the newer post when the older post has
// none left, so that no thread is idle while the last tasks of the older post are computed. A slot's next post is not begun
// before the slot's previous post is completely done, and posts are completed in order.
//
// Threads form groups. Group n begins with row n, then takes row n + groups, and so on: one row at a time, so that the row's
// blocks share a cache. A thread that finds no task in its group's rows steals a task of another group's row, so that one long
// row does not delay a layer. Rows are opened as they arrive and answered one by one as they finish.
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
    std::vector<int32_t> cores;  // core of each thread; empty: not bound
};

class Engine {
  public:
    Engine(void* mailbox, const char* pool, const Geometry& geometry, const EngineOptions& options, Kernels kernels);
    ~Engine();
    Engine(const Engine&) = delete;

    // The counts of one thread, on a cache line of their own because the thread writes them after every task.
    struct alignas(128) Counts {
        std::atomic<uint64_t> blocks{0}, tasks{0}, stolen{0};
    };
    struct Sums {
        uint64_t blocks = 0, tasks = 0, stolen = 0;
    };
    Sums sums() const;  // over all threads
    uint32_t threads() const { return uint32_t(threads_.size()); }  // that could be started

    PostReader reader;

  private:
    // The block list of one KV head of a row, and the list's tasks.
    struct Head {
        List list;
        Split split;
        uint32_t first_task;  // index among the tasks of the row
        std::atomic<uint32_t> tasks_left;
    };
    // An opened row. The lead writes it before the ticket, and does not write it again until every task of the row is
    // done.
    struct alignas(128) Row {
        // Number of tasks in the upper half, tasks claimed so far in the lower. A thread that adds n to the ticket
        // owns n tasks.
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint32_t> tasks_left{0};
        std::atomic<bool> out_of_bounds{false};
        std::atomic<uint64_t> check{0};  // checksum of the inputs used so far, see checks.h
        uint32_t generation = 0;
        std::unique_ptr<Head[]> heads;
    };
    // The post in one slot of the mailbox.
    struct Slot {
        OpenPost post;  // written by the lead while the slot has no tasks
        std::vector<Row> rows;
        Partials partials;
        bool answered = false;  // guarded by completing_
        // number of the slot's post, counted by the engine from 1: sequence numbers may repeat after a damaged bell
        alignas(128) std::atomic<uint64_t> serial{0};
        std::atomic<uint32_t> open_rows{0};  // rows that can be searched for tasks
        alignas(128) std::atomic<uint32_t> rows_left{0};  // opened and unanswered rows; plus one while rows are opened
    };

    // A task that a thread has claimed, ready to be computed.
    struct Claimed {
        Slot* slot;
        uint32_t row, head;
        uint32_t finished;  // after a batch's last task, the number of the batch's tasks; else 0
        bool in_bounds, whole;  // all pages are in the pool; the task is its whole list
        uint64_t check;  // checksum of the task's pages and masks
        std::vector<uint32_t> pages, masks;
        BlockAttention attention;
        ValueSum sum;  // used instead of `attention` by posts of kind sum_values
    };
    // Consecutive tasks of one row, claimed at once, so that shared memory is touched once for all of them.
    struct Batch {
        Slot* slot = nullptr;
        uint32_t row = 0, first = 0, next = 0, end = 0;
        bool is_empty() const { return next == end; }
    };
    // The private state of one thread.
    struct Hands {
        Hands(const Engine& engine, uint32_t thread);
        const uint32_t thread, group;
        Batch batch, following;
        Claimed tasks[2];
        Claimed* current = &tasks[0];
        Claimed* next = &tasks[1];
        bool claimed = false;  // `current` is a claimed task
        // Where this thread searches a slot's post for tasks: rows[group] is the group's first row that may have tasks
        // left.
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
    const uint32_t tasks_per_row_;  // most tasks of a row, plus guard tasks

    Slot slots_[mailbox_slots];
    std::vector<Counts> counts_;  // of each thread
    float* scratch_ = nullptr;    // partial results of tasks, for both slots
    uint64_t scratch_bytes_ = 0;
    // used by the lead only
    std::vector<List> lists_;
    Slot* opening_ = nullptr;  // the slot whose rows are being opened, or null
    uint32_t next_row_ = 0;    // of opening_
    uint64_t begun_ = 0;       // number of posts begun
    std::mutex completing_;
    uint64_t newest_ = 0;  // newest post begun; written by the lead, other threads read it under completing_
    // Words that threads write, on cache lines apart from each other and from words that threads only read.
    alignas(128) std::atomic<uint64_t> oldest_{1};     // oldest post that is not complete; newest_ + 1 if there is none
    alignas(128) std::atomic<int32_t> unclaimed_{0};   // tasks that no thread has claimed yet
    alignas(128) std::atomic<uint32_t> asleep_{0};     // number of sleeping helpers
    uint32_t rouse_ = 0;                               // futex that helpers sleep on

    alignas(128) std::atomic<bool> stop_{false};
    std::atomic<bool> is_alive_{false};  // the lead has started
    std::vector<std::thread> threads_;
};

}  // namespace sglang_hybrid
