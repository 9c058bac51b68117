#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <exception>
#include <new>

#include "engine/checks.h"
#include "engine/flags.h"
#include "engine/life.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sglang_hybrid {
namespace {

constexpr uint64_t nap_ns = 200'000'000;  // most time until a sleeping thread notices that it must stop
constexpr uint32_t looks_per_clock = 64;
// A batch has so few tasks that at least this many batches of its size remain for each thread. With larger batches, one thread
// could be left computing the last tasks alone.
constexpr uint32_t batches_left = 8;
constexpr int32_t most_batch_tasks = 4;

// Poisoned memory behind each row's partial results when AddressSanitizer is on. Rows lie side by side, so a write beyond one
// row's results would otherwise change another row's results unnoticed.
#if defined(__SANITIZE_ADDRESS__)
constexpr uint32_t guard_tasks = 1;
#else
constexpr uint32_t guard_tasks = 0;
#endif

void bind_to_core(int32_t core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

// Add to a sum that only one thread writes. A locked instruction would wait until all earlier stores are in the cache.
void add_to(std::atomic<uint64_t>& sum, uint64_t number) {
    sum.store(sum.load(std::memory_order_relaxed) + number, std::memory_order_relaxed);
}

}  // namespace

Engine::Engine(void* mailbox, const char* pool, const Geometry& geometry, const EngineOptions& options, Kernels kernels)
    : reader(mailbox, geometry, options.spin_us), geometry_(geometry), pool_(pool), options_(options), kernels_(kernels),
      groups_((options.threads + options.group_threads - 1) / options.group_threads),
      tasks_per_row_(geometry.kv_heads * most_tasks_of(geometry.max_blocks, options.task_blocks) + guard_tasks),
      counts_(options.threads), lists_(geometry.kv_heads) {
    // large enough for the most tasks possible; only pages that are used are ever backed by memory
    const uint64_t tasks = uint64_t{geometry.rows} * tasks_per_row_;
    const uint64_t outs = tasks * partial_out_floats(geometry), lses = tasks * geometry.group;
    scratch_bytes_ = mailbox_slots * (outs + lses) * sizeof(float);
    void* const scratch =
        mmap(nullptr, scratch_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (scratch == MAP_FAILED) throw std::bad_alloc();
    scratch_ = static_cast<float*>(scratch);
    float* partials = scratch_;
    for (Slot& slot : slots_) {
        slot.rows = std::vector<Row>(geometry.rows);
        for (Row& row : slot.rows) row.heads = std::make_unique<Head[]>(geometry.kv_heads);
        slot.partials = {partials, partials + outs};
        partials += outs + lses;
#if defined(__SANITIZE_ADDRESS__)
        for (uint32_t row = 0; row < geometry.rows; ++row) {
            const Partials guard = partials_of(slot, row, tasks_per_row_ - guard_tasks);
            __asan_poison_memory_region(guard.out, guard_tasks * partial_out_floats(geometry) * sizeof(float));
            __asan_poison_memory_region(guard.lse, guard_tasks * geometry.group * sizeof(float));
        }
#endif
    }
    reader.beat();
    try {
        start_threads();
    } catch (...) {
        munmap(scratch_, scratch_bytes_);
        throw;
    }
}

Engine::~Engine() {
    stop_.store(true);
    wake_all(rouse_);
    wake_all(reader.view.client().wake);
    for (std::thread& thread : threads_) thread.join();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(scratch_, scratch_bytes_);
#endif
    munmap(scratch_, scratch_bytes_);
}

// A limit on threads may leave fewer helpers; other groups' threads steal the rows of a group without threads. Throws if the
// lead cannot be started.
void Engine::start_threads() {
    threads_.reserve(options_.threads);
    threads_.emplace_back([this] { lead(); });
    while (!is_alive_.load()) sched_yield();  // a client that waits for the lead's end must first find the lead alive
    try {
        for (uint32_t thread = 1; thread < options_.threads; ++thread) {
            threads_.emplace_back([this, thread] { help(thread); });
        }
    } catch (const std::exception&) {
    }
}

Engine::Hands::Hands(const Engine& engine, uint32_t thread) : thread(thread), group(thread / engine.options_.group_threads) {
    for (Search& search : searches) search.rows.resize(engine.groups_);
}

Partials Engine::partials_of(const Slot& slot, uint32_t row, uint32_t task) const {
    const uint64_t index = uint64_t{row} * tasks_per_row_ + task;
    return {slot.partials.out + index * partial_out_floats(geometry_), slot.partials.lse + index * geometry_.group};
}

void Engine::lead() {
    const Life life(reader.view.worker());
    is_alive_.store(true);
    if (!options_.cores.empty()) bind_to_core(options_.cores[0]);
    Hands hands(*this, 0);
    for (uint32_t looks = 1;; ++looks) {
        const bool stop = stop_.load(std::memory_order_relaxed);
        const bool under_way = oldest_.load(std::memory_order_acquire) <= newest_;
        if (stop && !under_way) return;
        if (!under_way) {
            OpenPost post;
            const Event event = reader.wait(nap_ns, stop_, post);
            if (event == Event::near) rouse_helpers();
            if (event == Event::post) begin(post);
        }
        const bool opened = open_what_is_there();
        if (compute_one(hands) || opened) continue;
        // other threads compute the last tasks, or the client is still writing rows
        pause();
        if (looks % looks_per_clock == 0) sched_yield();
    }
}

void Engine::begin(const OpenPost& post) {
    Slot& slot = slots_[post.sequence % mailbox_slots];
    slot.post = post;
    slot.open_rows.store(0, std::memory_order_relaxed);
    slot.rows_left.store(1, std::memory_order_relaxed);
    slot.serial.store(++begun_, std::memory_order_release);
    opening_ = &slot;
    next_row_ = 0;
    const std::lock_guard<std::mutex> lock(completing_);
    // if all posts are complete, the order continues with this one: sequence numbers in between were given up
    if (oldest_.load(std::memory_order_relaxed) > newest_) oldest_.store(post.sequence, std::memory_order_release);
    newest_ = post.sequence;
}

// Open the arrived rows of the post being opened, or begin the next post and open its rows. Returns true if anything was done.
bool Engine::open_what_is_there() {
    if (!opening_) {
        OpenPost post;
        const bool slot_is_free = oldest_.load(std::memory_order_acquire) == newest_;
        if (!slot_is_free || stop_.load(std::memory_order_relaxed) || !reader.take_next(post)) return false;
        begin(post);
    }
    Slot& slot = *opening_;
    const uint32_t first = next_row_;
    for (; next_row_ < slot.post.rows; ++next_row_) {
        Request request;
        const Arrival arrival = reader.look_for_row(slot.post, next_row_, request);
        if (arrival == Arrival::awaited) return next_row_ > first;
        if (arrival == Arrival::late) {
            reader.abandoned.fetch_add(1, std::memory_order_relaxed);
            break;
        }
        if (request.blocks == 0) {
            reader.reply(slot.post, next_row_, request.generation, ReplyStatus::empty);
        } else if (!reader.read_lists(slot.post, next_row_, request, lists_.data())) {
            reader.reply(slot.post, next_row_, request.generation, ReplyStatus::refused);
        } else {
            open(slot, next_row_, request);
        }
    }
    opening_ = nullptr;
    close_row(slot);
    return true;
}

void Engine::open(Slot& slot, uint32_t index, const Request& request) {
    Row& row = slot.rows[index];
    uint32_t count = 0;
    uint64_t check = check_of_post(slot.post.layer, slot.post.scale, slot.post.kind);
    for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
        Head& head = row.heads[h];
        head.list = lists_[h];
        check += check_of_list(geometry_, h, head.list);
        head.split = split_list(head.list.count, options_.task_blocks);
        head.first_task = count;
        head.tasks_left.store(head.split.tasks, std::memory_order_relaxed);
        count += head.split.tasks;
    }
    row.generation = request.generation;
    row.check.store(check, std::memory_order_relaxed);
    row.out_of_bounds.store(false, std::memory_order_relaxed);
    row.tasks_left.store(count, std::memory_order_relaxed);
    slot.rows_left.fetch_add(1, std::memory_order_relaxed);
    unclaimed_.fetch_add(int32_t(count), std::memory_order_seq_cst);
    row.ticket.store(uint64_t{count} << 32, std::memory_order_release);
    slot.open_rows.store(index + 1, std::memory_order_release);
    if (asleep_.load(std::memory_order_seq_cst)) rouse_helpers();
}

// Count one row less to reply to. The last row ends its post: complete the post if it is the oldest, and then the next post if
// that has ended too.
void Engine::close_row(Slot& slot) {
    if (slot.rows_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::lock_guard<std::mutex> lock(completing_);
    slot.answered = true;
    for (uint64_t oldest = oldest_.load(std::memory_order_relaxed); oldest <= newest_; ++oldest) {
        Slot& first = slots_[oldest % mailbox_slots];
        if (!first.answered) return;
        first.answered = false;
        reader.complete(first.post);
        oldest_.store(oldest + 1, std::memory_order_release);
    }
}

// Return how many tasks a thread may claim at once. 0: so few tasks are left that a thread should claim none ahead of need.
int32_t Engine::share_of_unclaimed() const {
    const int32_t share = unclaimed_.load(std::memory_order_relaxed) / int32_t(batches_left * options_.threads);
    return std::min(share, most_batch_tasks);
}

bool Engine::take_batch(Hands& hands, Batch& batch) {
    if (unclaimed_.load(std::memory_order_relaxed) <= 0) return false;
    const uint64_t oldest = oldest_.load(std::memory_order_acquire);
    for (uint64_t sequence = oldest; sequence < oldest + mailbox_slots; ++sequence) {
        if (take_batch_of(slots_[sequence % mailbox_slots], hands, batch)) return true;
    }
    return false;
}

// Claim a batch of a slot's tasks: from rows of the thread's own group first, then from rows of the other groups.
bool Engine::take_batch_of(Slot& slot, Hands& hands, Batch& batch) {
    Hands::Search& search = hands.searches[&slot - slots_];
    const uint64_t serial = slot.serial.load(std::memory_order_acquire);
    if (search.serial != serial) {
        search.serial = serial;
        for (uint32_t group = 0; group < groups_; ++group) search.rows[group] = group;
    }
    const uint32_t rows = slot.open_rows.load(std::memory_order_acquire);
    for (uint32_t others = 0; others < groups_; ++others) {
        for (uint32_t& index = search.rows[(hands.group + others) % groups_]; index < rows; index += groups_) {
            Row& row = slot.rows[index];
            uint64_t ticket = row.ticket.load(std::memory_order_acquire);
            while (uint32_t(ticket) < uint32_t(ticket >> 32)) {
                const uint32_t there = uint32_t(ticket >> 32) - uint32_t(ticket);
                const uint32_t size = std::min(there, uint32_t(std::max(share_of_unclaimed(), 1)));
                if (!row.ticket.compare_exchange_weak(ticket, ticket + size, std::memory_order_acq_rel,
                                                      std::memory_order_acquire)) {
                    continue;
                }
                unclaimed_.fetch_sub(int32_t(size), std::memory_order_relaxed);
                if (others) add_to(counts_[hands.thread].stolen, size);
                batch = {&slot, index, uint32_t(ticket), uint32_t(ticket), uint32_t(ticket) + size};
                return true;
            }
        }
    }
    return false;
}

// Prefetch the row's heads, which the lead wrote, and the lists, which the client wrote, one task before they are needed.
void Engine::request_lists(const Batch& batch) const {
    constexpr uint64_t line = 64;
    const char* const heads = reinterpret_cast<const char*>(batch.slot->rows[batch.row].heads.get());
    for (uint64_t at = 0; at < geometry_.kv_heads * sizeof(Head); at += line) __builtin_prefetch(heads + at);
    const char* const lists = reinterpret_cast<const char*>(reader.view.pages(batch.slot->post.sequence, batch.row, 0));
    // all heads' lists if they are short, else the beginning: hardware prefetchers continue from there
    constexpr uint64_t most_bytes = 1024;
    const uint64_t bytes = uint64_t{geometry_.kv_heads} * geometry_.max_blocks * sizeof(uint32_t);
    for (uint64_t at = 0; at < std::min(bytes, most_bytes); at += line) __builtin_prefetch(lists + at);
}

bool Engine::claim_next(Hands& hands, Claimed& claimed) {
    if (hands.batch.is_empty()) std::swap(hands.batch, hands.following);
    if (hands.batch.is_empty() && !take_batch(hands, hands.batch)) return false;
    prepare(hands.batch, claimed);
    ++hands.batch.next;
    // claim the following batch before it is needed, so that its cache lines have arrived by then
    if (hands.batch.is_empty() && share_of_unclaimed() > 0 && take_batch(hands, hands.following)) {
        request_lists(hands.following);
    }
    return true;
}

bool Engine::compute_one(Hands& hands) {
    if (!hands.claimed && !claim_next(hands, *hands.current)) return false;
    // Claim the next task ahead, so that its blocks are prefetched in time, but not when other threads would go without
    // tasks.
    const bool plenty = !hands.batch.is_empty() || !hands.following.is_empty() ||
                        unclaimed_.load(std::memory_order_relaxed) > int32_t(options_.threads);
    const bool more = plenty && claim_next(hands, *hands.next);
    compute(*hands.current, more ? hands.next : nullptr, hands.thread);
    std::swap(hands.current, hands.next);
    hands.claimed = more;
    return true;
}

void Engine::prepare(const Batch& batch, Claimed& claimed) const {
    const Slot& slot = *batch.slot;
    const OpenPost& post = slot.post;
    const uint32_t index = batch.row, task = batch.next;
    const Row& row = slot.rows[index];
    uint32_t h = 0;
    while (task >= row.heads[h].first_task + row.heads[h].split.tasks) ++h;
    const Head& head = row.heads[h];
    const uint32_t part = task - head.first_task;
    const uint32_t first = part * head.split.size;
    const uint32_t count = std::min(head.split.size, head.list.count - first);
    const bool whole = head.split.tasks == 1;
    claimed.slot = batch.slot;
    claimed.row = index;
    claimed.head = h;
    claimed.whole = whole;
    claimed.finished = task + 1 == batch.end ? batch.end - batch.first : 0;

    // check a private copy: shared memory may change between the check and the use
    const uint32_t* const shared = reader.view.pages(post.sequence, index, h) + first;
    claimed.pages.resize(count);
    claimed.in_bounds = true;
    claimed.check = 0;
    for (uint32_t i = 0; i < count; ++i) {
        claimed.pages[i] = __atomic_load_n(&shared[i], __ATOMIC_RELAXED);
        claimed.in_bounds &= claimed.pages[i] < geometry_.pages;
        claimed.check += check_of_page(geometry_, h, first + i, claimed.pages[i]);
    }
    if (post.kind == PostKind::attend_masked) {
        claimed.masks.resize(count);
        const uint32_t* const shared_masks = reader.view.masks(post.sequence, index, h) + first;
        for (uint32_t i = 0; i < count; ++i) {
            claimed.masks[i] = __atomic_load_n(&shared_masks[i], __ATOMIC_RELAXED);
            claimed.check += check_of_mask(geometry_, h, first + i, claimed.masks[i]);
        }
    }
    const char* const query = reader.view.query(post.sequence, index, h);
    const Partials partial = partials_of(slot, index, task);
    BlockAttention& attention = claimed.attention = attention_of(geometry_, pool_, post.layer, h, query, post.scale);
    attention.pages = claimed.pages.data();
    if (post.kind == PostKind::attend_masked) attention.masks = claimed.masks.data();
    attention.count = count;
    attention.last_fill = part + 1 == head.split.tasks ? head.list.last_fill : block_tokens;
    attention.out = whole ? reader.view.output(post.sequence, index, h) : partial.out;
    attention.lse = whole ? reader.view.lse(post.sequence, index, h) : partial.lse;

    constexpr uint64_t line = 64;
    if (post.kind == PostKind::sum_values) {
        const float* const weights = reader.view.weights(post.sequence, index, h) + uint64_t{first} * block_tokens;
        claimed.sum = sum_of(attention, weights, reader.view.weight_stride());
    } else {
        // query and output are in the client's cache: the client wrote this query and read the previous output
        const uint64_t query_bytes = partial_out_floats(geometry_) * query_bytes_of(static_cast<DType>(geometry_.dtype));
        for (uint64_t at = 0; at < query_bytes; at += line) __builtin_prefetch(query + at);
    }
    const char* const out = reinterpret_cast<const char*>(attention.out);
    for (uint64_t at = 0; at < partial_out_floats(geometry_) * sizeof(float); at += line) request_for_writing(out + at);
}

void Engine::compute(Claimed& claimed, const Claimed* next, uint32_t thread) {
    const uint32_t index = claimed.row, h = claimed.head;
    Slot& slot = *claimed.slot;
    const OpenPost& post = slot.post;
    Row& row = slot.rows[index];
    Head& head = row.heads[h];
    if (claimed.in_bounds) {
        BlockAttention& attention = claimed.attention;
        if (post.kind == PostKind::sum_values) {
            kernels_.sum(claimed.sum);
            std::fill_n(attention.lse, geometry_.group, 0.0f);
        } else {
            const bool announced = next && next->in_bounds && next->slot->post.kind == PostKind::attend;
            attention.next = announced ? &next->attention : nullptr;
            attend(kernels_.attend, attention);
        }
        add_to(counts_[thread].blocks, attention.count);
    } else {
        row.out_of_bounds.store(true, std::memory_order_relaxed);
    }
    row.check.fetch_add(claimed.check, std::memory_order_relaxed);
    add_to(counts_[thread].tasks, 1);

    if (!claimed.whole && head.tasks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const Partials parts = partials_of(slot, index, head.first_task);
        float* const out = reader.view.output(post.sequence, index, h);
        float* const lse = reader.view.lse(post.sequence, index, h);
        if (post.kind == PostKind::sum_values) {
            add_partial_sums(geometry_, parts, head.split.tasks, out);
            std::fill_n(lse, geometry_.group, 0.0f);
        } else {
            merge_partials(geometry_, parts, head.split.tasks, out, lse);
        }
    }
    if (claimed.finished && row.tasks_left.fetch_sub(claimed.finished, std::memory_order_acq_rel) == claimed.finished) {
        for (uint32_t other = 0; other < geometry_.kv_heads; ++other) {
            if (row.heads[other].list.count) continue;
            std::fill_n(reader.view.lse(post.sequence, index, other), geometry_.group, -std::numeric_limits<float>::infinity());
        }
        const bool refused = row.out_of_bounds.load(std::memory_order_relaxed);
        reader.reply(post, index, row.generation, refused ? ReplyStatus::refused : ReplyStatus::answered,
                     row.check.load(std::memory_order_relaxed));
        close_row(slot);
    }
}

void Engine::help(uint32_t thread) {
    if (!options_.cores.empty()) bind_to_core(options_.cores[thread]);
    Hands hands(*this, thread);
    while (!stop_.load(std::memory_order_relaxed)) {
        for (uint32_t look = 0; look < looks_per_clock; ++look) {
            while (compute_one(hands)) look = 0;
            pause();
        }
        sched_yield();  // the client, whose next post all threads wait for, may share this core
        if (now_ns() < reader.awake_until_ns()) continue;
        const uint32_t seen = load_acquire(rouse_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        if (unclaimed_.load(std::memory_order_seq_cst) <= 0 && !stop_.load()) sleep_on(rouse_, seen, nap_ns);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
}

// Wait a moment. A thread that is not bound to a core yields: it may share its core with the thread that it waits for.
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
