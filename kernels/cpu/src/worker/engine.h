// The worker's threads. One of them, the lead, waits for posts and opens their rows; all of them compute.
//
// Threads form groups. Group n begins with row n, then n + groups, and so on: one sequence at a time, so that its blocks
// share a cache. A thread that finds no task in the rows of its group takes one of any other row, so that one long
// sequence does not hold up a layer. Rows are opened as they arrive, and replied to one by one as they finish.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "worker/post_reader.h"
#include "worker/tasks.h"

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
    Engine(void* mailbox, const char* pool, const Geometry& geometry, const EngineOptions& options, Kernel kernel);
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
        // Tasks to do in the upper half, tasks given out in the lower. Whoever adds one to it owns that task.
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint32_t> tasks_left{0};
        std::atomic<bool> out_of_bounds{false};
        uint32_t generation = 0;
        std::unique_ptr<Head[]> heads;
    };

    // A task that a thread has claimed, ready to be computed.
    struct Claimed {
        uint32_t row, head;
        bool in_bounds, whole;
        std::vector<uint32_t> pages;
        BlockAttention attention;
    };
    // Where a thread looks for tasks: the rows of its own group first, then those of the other groups.
    struct Search {
        uint32_t group;
        uint32_t others;  // groups that were left behind, 0: its own
        uint32_t row;
    };

    void lead();
    void help(uint32_t thread);
    void open(uint32_t row, const Request& request);
    bool claim(Row& row, uint32_t& task);
    bool claim_next(Search& search, uint32_t rows, uint32_t thread, Claimed& claimed);
    void prepare(uint32_t row, uint32_t task, Claimed& claimed) const;
    bool compute_what_is_open(uint32_t thread);
    void compute(Claimed& claimed, const Claimed* next, uint32_t thread);
    void pause();
    void rouse_helpers();
    Partials partials_of(uint32_t row, uint32_t task) const;

    const Geometry geometry_;
    const char* const pool_;
    const EngineOptions options_;
    const Kernel kernel_;
    const uint32_t groups_;
    const uint32_t tasks_per_row_;  // at most

    OpenPost post_;
    std::vector<Row> rows_;
    std::vector<List> lists_;  // the lead's
    std::vector<Counts> counts_;  // of each thread
    // what threads write, apart from what they only read and from each other
    alignas(128) std::atomic<uint32_t> open_rows_{0};  // of the current post
    alignas(128) std::atomic<uint32_t> rows_left_{0};  // opened and not replied to
    alignas(128) std::atomic<int32_t> unclaimed_{0};   // tasks that somebody could take
    alignas(128) std::atomic<uint32_t> asleep_{0};     // helpers
    uint32_t rouse_ = 0;                               // futex of sleeping helpers
    alignas(128) float* scratch_ = nullptr;
    uint64_t scratch_bytes_ = 0;

    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

}  // namespace sglang_hybrid
