#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <vector>

namespace emulated {

Index thread, block, threads, blocks;

namespace {

constexpr uint32_t stack_bytes = 256 << 10;
constexpr uint32_t most_shared = 227 << 10;
constexpr uint32_t guard_bytes = 4096;
constexpr int shared_garbage = 0xAB, copy_garbage = 0xCD;

struct Copy {
    uint32_t to;
    const void* from;
    bool counts;
};

// What a thread waits for: that a count is another one than it was.
struct Wait {
    const uint64_t* count = nullptr;
    uint64_t was = 0;

    bool is_over() const { return !count || *count != was; }
};

struct Fiber {
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(stack_bytes);
    jmp_buf here;
    bool begun = false, done;  // begun: it has run for some kernel, and waits for the next one where it ended
    Wait wait;
    std::deque<std::vector<Copy>> groups;  // of copies; the last one is not committed yet
};

struct Warp {
    uint32_t arrived = 0;
    uint64_t turn = 0;
    char shown[2][32 * most_bytes];
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::unique_ptr<Warp>> warps;
std::function<void()> running;
jmp_buf scheduler;
uint32_t order = 1;
alignas(1024) char shared[most_shared + guard_bytes];
uint32_t alive, at_barrier;
int counted, count_of_barrier;
uint64_t barriers, progress;

[[noreturn]] void fail(const char* what, uint32_t number) {
    std::fprintf(stderr, "emulated kernel, CTA %u, thread %u: %s (%u)\n", block.x, thread.x, what, number);
    std::abort();
}

// Below `bound`, by an xorshift: fibers take many turns.
uint32_t random_below(uint32_t bound) {
    order ^= order << 13;
    order ^= order >> 17;
    order ^= order << 5;
    return order % bound;
}

void shuffle(std::vector<uint32_t>& turns) {
    for (uint32_t i = uint32_t(turns.size()); i > 1; --i) std::swap(turns[i - 1], turns[random_below(i)]);
}

void pause() {
    if (!_setjmp(fibers[thread.x]->here)) _longjmp(scheduler, 1);  // who goes on here sets thread.x
}

void wait_for_another(const uint64_t& count, uint64_t was) {
    if (count != was) return;
    fibers[thread.x]->wait = {&count, was};
    pause();
}

void open_barrier() {
    if (!at_barrier || at_barrier != alive) return;  // threads that ended do not count
    count_of_barrier = counted;
    at_barrier = 0;
    counted = 0;
    ++barriers;
    ++progress;
}

// A thread of one CTA after the other: what makes a fiber takes longer than what most of them do.
void run_threads() {
    for (;;) {
        running();
        fibers[thread.x]->done = true;
        --alive;
        ++progress;
        open_barrier();
        pause();
    }
}

void resume(uint32_t which) {
    thread.x = which;
    Fiber& fiber = *fibers[which];
    fiber.wait = {};
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.get();
    start.uc_stack.ss_size = stack_bytes;
    makecontext(&start, run_threads, 0);
    setcontext(&start);
}

// Lanes of a warp, each to its next collective operation, in one of many orders.
void run_warp(uint32_t warp) {
    const uint32_t begin = random_below(32), step = 2 * random_below(16) + 1;
    for (uint32_t n = 0; n < 32; ++n) {
        const uint32_t i = warp * 32 + (begin + n * step) % 32;
        if (i < threads.x && !fibers[i]->done && fibers[i]->wait.is_over()) resume(i);
    }
}

void run_cta(uint32_t shared_bytes) {
    std::memset(shared, shared_garbage, shared_bytes + guard_bytes);
    const uint32_t warp_count = (threads.x + 31) / 32;
    while (warps.size() < warp_count) warps.push_back(std::make_unique<Warp>());
    alive = threads.x;
    at_barrier = 0;
    counted = 0;
    std::vector<uint32_t> turns(warp_count);
    for (uint32_t i = 0; i < warp_count; ++i) {
        turns[i] = i;
        warps[i]->arrived = 0;
    }
    for (uint32_t i = 0; i < threads.x; ++i) {
        Fiber& fiber = *fibers[i];
        fiber.done = false;
        fiber.wait = {};
        if (fiber.groups.size() != 1 || !fiber.groups.front().empty()) fiber.groups.assign(1, {});
    }
    for (uint32_t idle = 0; alive;) {
        const uint64_t before = progress;
        shuffle(turns);
        for (const uint32_t warp : turns) {
            if (random_below(3)) run_warp(warp);  // so that some get ahead of others
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > 200) fail("threads wait for each other", alive);
    }
    for (uint32_t i = shared_bytes; i < shared_bytes + guard_bytes; ++i) {
        if (static_cast<unsigned char>(shared[i]) != shared_garbage) fail("wrote beyond its shared memory", i);
    }
}

}  // namespace

void launch(uint32_t ctas, uint32_t threads_of_cta, uint32_t shared_bytes, std::function<void()> kernel) {
    if (shared_bytes > most_shared) fail("wants more shared memory than there is", shared_bytes);
    running = std::move(kernel);
    threads.x = threads_of_cta;
    blocks.x = ctas;
    while (fibers.size() < threads_of_cta) fibers.push_back(std::make_unique<Fiber>());
    std::vector<uint32_t> turns(ctas);
    for (uint32_t i = 0; i < ctas; ++i) turns[i] = i;
    shuffle(turns);
    for (const uint32_t i : turns) {
        block.x = i;
        run_cta(shared_bytes);
    }
}

char* dynamic_shared() { return shared; }
char* at_shared(uint32_t address) { return shared + address; }

uint32_t shared_address(const void* pointer) {
    const auto* const byte = static_cast<const char*>(pointer);
    if (byte < shared || byte >= shared + most_shared) fail("this is no dynamic shared memory", 0);
    return static_cast<uint32_t>(byte - shared);
}

const char* show(const void* mine, uint32_t bytes) {
    Warp& warp = *warps[thread.x / 32];
    const uint64_t turn = warp.turn;
    char* const shown = warp.shown[turn % 2];
    std::memcpy(shown + thread.x % 32 * most_bytes, mine, bytes);
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.turn;
        ++progress;
    }
    wait_for_another(warp.turn, turn);
    return shown;
}

int barrier(bool counts) {
    const uint64_t turn = barriers;
    counted += counts;
    ++at_barrier;
    open_barrier();
    wait_for_another(barriers, turn);
    return count_of_barrier;
}

void copy_later(uint32_t to, const void* from, bool counts) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("a copy is not aligned", to);
    std::memset(at_shared(to), copy_garbage, 16);
    fibers[thread.x]->groups.back().push_back({to, from, counts});
}

void commit() { fibers[thread.x]->groups.push_back({}); }

void wait(uint32_t pending) {
    auto& groups = fibers[thread.x]->groups;
    for (; groups.size() - 1 > pending; groups.pop_front()) {
        for (const Copy& copy : groups.front()) {
            if (copy.counts) std::memcpy(at_shared(copy.to), copy.from, 16);
            else std::memset(at_shared(copy.to), 0, 16);
        }
    }
}

}  // namespace emulated
