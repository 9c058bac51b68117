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

// Of one writer. A locked instruction would wait until all that was written before it is in the cache.
void add_to(std::atomic<uint64_t>& sum, uint64_t number) {
    sum.store(sum.load(std::memory_order_relaxed) + number, std::memory_order_relaxed);
}

}  // namespace

Engine::Engine(void* mailbox, const char* pool, const Geometry& geometry, const EngineOptions& options, Kernel kernel)
    : reader(mailbox, geometry, options.spin_us), geometry_(geometry), pool_(pool), options_(options), kernel_(kernel),
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

bool Engine::claim_next(Search& search, uint32_t rows, uint32_t thread, Claimed& claimed) {
    uint32_t task = 0;
    for (; search.others < groups_; ++search.others) {
        for (; search.row < rows; search.row += groups_) {
            if (!claim(rows_[search.row], task)) continue;
            prepare(search.row, task, claimed);
            if (search.others) {
                add_to(counts_[thread].stolen, 1);
                search.row += groups_;  // one at a time: its own group is busy there
            }
            return true;
        }
        if (unclaimed_.load(std::memory_order_relaxed) <= 0) return false;
        search.row = (search.group + search.others + 1) % groups_;
    }
    return false;
}

bool Engine::compute_what_is_open(uint32_t thread) {
    thread_local Claimed tasks[2];
    const uint32_t rows = open_rows_.load(std::memory_order_acquire);
    const uint32_t group = thread / options_.group_threads;
    Search search{group, 0, group};
    Claimed* current = &tasks[0];
    Claimed* next = &tasks[1];
    if (!claim_next(search, rows, thread, *current)) return false;
    for (bool more = true; more;) {
        // Claimed ahead, so that its blocks are requested from memory in time; but not when others would go without.
        const bool plenty = unclaimed_.load(std::memory_order_relaxed) > int32_t(options_.threads);
        more = plenty && claim_next(search, rows, thread, *next);
        compute(*current, more ? next : nullptr, thread);
        if (!more) more = claim_next(search, rows, thread, *next);
        std::swap(current, next);
    }
    return true;
}

void Engine::prepare(uint32_t index, uint32_t task, Claimed& claimed) const {
    const Row& row = rows_[index];
    uint32_t h = 0;
    while (task >= row.heads[h].first_task + row.heads[h].split.tasks) ++h;
    const Head& head = row.heads[h];
    const uint32_t part = task - head.first_task;
    const uint32_t first = part * head.split.size;
    const uint32_t count = std::min(head.split.size, head.list.count - first);
    const bool whole = head.split.tasks == 1;
    claimed.row = index;
    claimed.head = h;
    claimed.whole = whole;

    // checked on a private copy: shared memory may change between the check and the use
    const uint32_t* const shared = reader.view.pages(post_.sequence, index, h) + first;
    claimed.pages.resize(count);
    claimed.in_bounds = true;
    for (uint32_t i = 0; i < count; ++i) {
        claimed.pages[i] = __atomic_load_n(&shared[i], __ATOMIC_RELAXED);
        claimed.in_bounds &= claimed.pages[i] < geometry_.pages;
    }
    const char* const query = reader.view.query(post_.sequence, index, h);
    const Partials partial = partials_of(index, task);
    BlockAttention& attention = claimed.attention = attention_of(geometry_, pool_, post_.layer, h, query, post_.scale);
    attention.pages = claimed.pages.data();
    attention.count = count;
    attention.last_fill = part + 1 == head.split.tasks ? head.list.last_fill : block_tokens;
    attention.out = whole ? reader.view.output(post_.sequence, index, h) : partial.out;
    attention.lse = whole ? reader.view.lse(post_.sequence, index, h) : partial.lse;

    // the client's cache has both: it wrote this query, and read the output that was there before
    constexpr uint64_t line = 64;
    const uint64_t query_bytes = partial_out_floats(geometry_) * bytes_of(static_cast<DType>(geometry_.dtype));
    for (uint64_t at = 0; at < query_bytes; at += line) __builtin_prefetch(query + at);
    const char* const out = reinterpret_cast<const char*>(attention.out);
    for (uint64_t at = 0; at < partial_out_floats(geometry_) * sizeof(float); at += line) request_for_writing(out + at);
}

void Engine::compute(Claimed& claimed, const Claimed* next, uint32_t thread) {
    const uint32_t index = claimed.row, h = claimed.head;
    Row& row = rows_[index];
    Head& head = row.heads[h];
    if (claimed.in_bounds) {
        BlockAttention& attention = claimed.attention;
        attention.next = next && next->in_bounds ? &next->attention : nullptr;
        kernel_(attention);
        add_to(counts_[thread].blocks, attention.count);
    } else {
        row.out_of_bounds.store(true, std::memory_order_relaxed);
    }
    add_to(counts_[thread].tasks, 1);

    if (!claimed.whole && head.tasks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        merge_partials(geometry_, partials_of(index, head.first_task), head.split.tasks,
                       reader.view.output(post_.sequence, index, h), reader.view.lse(post_.sequence, index, h));
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
        sched_yield();  // the client may share this core, and all wait for its next post
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
