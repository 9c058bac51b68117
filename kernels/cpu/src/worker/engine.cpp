#include "worker/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <new>

#include "worker/flags.h"

namespace sglang_hybrid {
namespace {

constexpr uint64_t nap_ns = 200'000'000;  // how late a sleeping thread may notice that it shall stop
constexpr uint32_t looks_per_clock = 64;

void bind_to_core(int32_t core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

Engine::Engine(void* mailbox, const char* pool, const Geometry& geometry, const EngineOptions& options, Kernel kernel)
    : reader(mailbox, geometry, options.spin_us, options.cores.empty()), geometry_(geometry), pool_(pool), options_(options), kernel_(kernel),
      groups_((options.threads + options.group_threads - 1) / options.group_threads),
      tasks_per_row_(geometry.kv_heads * split_list(geometry.max_blocks, options.task_blocks).tasks), rows_(geometry.rows),
      lists_(geometry.kv_heads), counts_(options.threads) {
    for (Row& row : rows_) row.heads = std::make_unique<Head[]>(geometry.kv_heads);
    // room for the most tasks there can be; only what is used is ever backed by memory
    scratch_bytes_ = uint64_t{geometry.rows} * tasks_per_row_ * (partial_out_floats(geometry) + geometry.group) * sizeof(float);
    void* const scratch =
        mmap(nullptr, scratch_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (scratch == MAP_FAILED) throw std::bad_alloc();
    scratch_ = static_cast<float*>(scratch);
    reader.beat();
    threads_.emplace_back([this] { lead(); });
    for (uint32_t thread = 1; thread < options_.threads; ++thread) threads_.emplace_back([this, thread] { help(thread); });
}

Engine::~Engine() {
    stop_.store(true);
    wake_all(rouse_);
    wake_all(reader.view.client().wake);
    for (std::thread& thread : threads_) thread.join();
    munmap(scratch_, scratch_bytes_);
}

Partials Engine::partials_of(uint32_t row, uint32_t task) const {
    const uint64_t index = uint64_t{row} * tasks_per_row_ + task;
    float* const lses = scratch_ + uint64_t{geometry_.rows} * tasks_per_row_ * partial_out_floats(geometry_);
    return {scratch_ + index * partial_out_floats(geometry_), lses + index * geometry_.group};
}

void Engine::lead() {
    if (!options_.cores.empty()) bind_to_core(options_.cores[0]);
    while (!stop_.load(std::memory_order_relaxed)) {
        const Event event = reader.wait(nap_ns, stop_, post_);
        if (event == Event::near) rouse_helpers();
        if (event != Event::post) continue;
        open_rows_.store(post_.rows, std::memory_order_release);
        for (uint32_t row = 0; row < post_.rows; ++row) {
            Request request;
            if (!reader.wait_for_row(post_, row, request)) {
                reader.abandoned.fetch_add(1, std::memory_order_relaxed);
                break;
            }
            if (request.blocks == 0) {
                reader.reply(post_, row, request.generation, ReplyStatus::empty);
            } else if (!reader.read_lists(post_, row, request, lists_.data())) {
                reader.reply(post_, row, request.generation, ReplyStatus::refused);
            } else {
                open(row, request);
            }
        }
        // other threads may still work on tasks of this post when there is nothing left to take
        while (rows_left_.load(std::memory_order_acquire)) {
            if (!compute_what_is_open(0)) pause();
        }
        reader.complete(post_);
    }
}

void Engine::open(uint32_t index, const Request& request) {
    Row& row = rows_[index];
    uint32_t count = 0;
    for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
        Head& head = row.heads[h];
        head.list = lists_[h];
        head.split = split_list(head.list.count, options_.task_blocks);
        head.first_task = count;
        head.tasks_left.store(head.split.tasks, std::memory_order_relaxed);
        count += head.split.tasks;
    }
    row.generation = request.generation;
    row.out_of_bounds.store(false, std::memory_order_relaxed);
    row.tasks_left.store(count, std::memory_order_relaxed);
    rows_left_.fetch_add(1, std::memory_order_relaxed);
    unclaimed_.fetch_add(int32_t(count), std::memory_order_seq_cst);
    row.ticket.store(uint64_t{count} << 32, std::memory_order_release);
    if (asleep_.load(std::memory_order_seq_cst)) rouse_helpers();
}

bool Engine::claim(Row& row, uint32_t& task) {
    uint64_t ticket = row.ticket.load(std::memory_order_acquire);
    while (uint32_t(ticket) < uint32_t(ticket >> 32)) {
        if (row.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            unclaimed_.fetch_sub(1, std::memory_order_relaxed);
            task = uint32_t(ticket);
            return true;
        }
    }
    return false;
}

uint32_t Engine::compute_what_is_open(uint32_t thread) {
    const uint32_t group = thread / options_.group_threads;
    const uint32_t rows = open_rows_.load(std::memory_order_acquire);
    uint32_t done = 0, task = 0;
    for (uint32_t row = group; row < rows; row += groups_) {
        for (; claim(rows_[row], task); ++done) compute(row, task, thread);
    }
    for (uint32_t step = 1; step < groups_ && unclaimed_.load(std::memory_order_relaxed) > 0; ++step) {
        for (uint32_t row = (group + step) % groups_; row < rows; row += groups_) {
            // one at a time: its own group is busy there, and ours may get a row meanwhile
            if (claim(rows_[row], task)) {
                compute(row, task, thread);
                counts_[thread].stolen.fetch_add(1, std::memory_order_relaxed);
                ++done;
            }
        }
    }
    return done;
}

void Engine::compute(uint32_t index, uint32_t task, uint32_t thread) {
    thread_local std::vector<uint32_t> pages;
    Row& row = rows_[index];
    uint32_t h = 0;
    while (task >= row.heads[h].first_task + row.heads[h].split.tasks) ++h;
    Head& head = row.heads[h];
    const uint32_t part = task - head.first_task;
    const uint32_t first = part * head.split.size;
    const uint32_t count = std::min(head.split.size, head.list.count - first);

    // checked on a private copy: shared memory may change between the check and the use
    const uint32_t* const shared = reader.view.pages(post_.sequence, index, h) + first;
    pages.resize(count);
    bool in_bounds = true;
    for (uint32_t i = 0; i < count; ++i) {
        pages[i] = __atomic_load_n(&shared[i], __ATOMIC_RELAXED);
        in_bounds &= pages[i] < geometry_.pages;
    }
    const bool whole = head.split.tasks == 1;
    float* const out = reader.view.output(post_.sequence, index, h);
    float* const lse = reader.view.lse(post_.sequence, index, h);
    if (in_bounds) {
        const char* const query = reader.view.query(post_.sequence, index, h);
        BlockAttention attention = attention_of(geometry_, pool_, post_.layer, h, query, post_.scale);
        const Partials partial = partials_of(index, task);
        attention.pages = pages.data();
        attention.count = count;
        attention.last_fill = part + 1 == head.split.tasks ? head.list.last_fill : block_tokens;
        attention.out = whole ? out : partial.out;
        attention.lse = whole ? lse : partial.lse;
        kernel_(attention);
        counts_[thread].blocks.fetch_add(count, std::memory_order_relaxed);
    } else {
        row.out_of_bounds.store(true, std::memory_order_relaxed);
    }
    counts_[thread].tasks.fetch_add(1, std::memory_order_relaxed);

    if (head.tasks_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && !whole) {
        merge_partials(geometry_, partials_of(index, head.first_task), head.split.tasks, out, lse);
    }
    if (row.tasks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        for (uint32_t other = 0; other < geometry_.kv_heads; ++other) {
            if (row.heads[other].list.count) continue;
            std::fill_n(reader.view.lse(post_.sequence, index, other), geometry_.group,
                        -std::numeric_limits<float>::infinity());
        }
        const bool refused = row.out_of_bounds.load(std::memory_order_relaxed);
        reader.reply(post_, index, row.generation, refused ? ReplyStatus::refused : ReplyStatus::answered);
        rows_left_.fetch_sub(1, std::memory_order_release);
    }
}

void Engine::help(uint32_t thread) {
    if (!options_.cores.empty()) bind_to_core(options_.cores[thread]);
    while (!stop_.load(std::memory_order_relaxed)) {
        for (uint32_t look = 0; look < looks_per_clock; ++look) {
            if (unclaimed_.load(std::memory_order_relaxed) > 0 && compute_what_is_open(thread)) look = 0;
            pause();
        }
        if (now_ns() < reader.awake_until_ns()) continue;
        const uint32_t seen = load_acquire(rouse_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        if (unclaimed_.load(std::memory_order_seq_cst) <= 0 && !stop_.load()) sleep_on(rouse_, seen, nap_ns);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
}

// A thread that shares its core may be in the way of the one it waits for.
void Engine::pause() {
    if (options_.cores.empty()) sched_yield();
    pause_core();
}

Engine::Sums Engine::sums() const {
    Sums sums;
    for (const Counts& counts : counts_) {
        sums.blocks += counts.blocks;
        sums.tasks += counts.tasks;
        sums.stolen += counts.stolen;
    }
    return sums;
}

void Engine::rouse_helpers() {
    if (options_.threads > 1) wake_all(rouse_);
}

}  // namespace sglang_hybrid
