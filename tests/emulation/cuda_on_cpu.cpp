#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <random>
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

struct Fiber {
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(stack_bytes);
    ucontext_t start;
    jmp_buf here;
    bool begun, done;
    std::deque<std::vector<Copy>> groups;  // of copies; the last one is not committed yet
};

struct Warp {
    uint32_t arrived = 0;
    uint64_t turn = 0;
    char shown[2][32 * most_bytes];
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
std::function<void()> running;
jmp_buf scheduler;
std::mt19937 order(1);
alignas(1024) char shared[most_shared + guard_bytes];
uint32_t alive, at_barrier;
int counted, count_of_barrier;
uint64_t barriers, progress;

[[noreturn]] void fail(const char* what, uint32_t number) {
    std::fprintf(stderr, "emulated kernel, CTA %u, thread %u: %s (%u)\n", block.x, thread.x, what, number);
    std::abort();
}

void pause() {
    const uint32_t me = thread.x;
    if (!_setjmp(fibers[me]->here)) _longjmp(scheduler, 1);
    thread.x = me;
}

void open_barrier() {
    if (!at_barrier || at_barrier != alive) return;  // threads that ended do not count
    count_of_barrier = counted;
    at_barrier = 0;
    counted = 0;
    ++barriers;
    ++progress;
}

void run_thread() {
    const uint32_t me = thread.x;
    running();
    fibers[me]->done = true;
    --alive;
    ++progress;
    open_barrier();
    _longjmp(scheduler, 1);
}

void resume(uint32_t which) {
    thread.x = which;
    Fiber& fiber = *fibers[which];
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}

void run_cta(uint32_t shared_bytes) {
    std::memset(shared, shared_garbage, shared_bytes + guard_bytes);
    warps.assign((threads.x + 31) / 32, Warp());
    alive = threads.x;
    at_barrier = 0;
    counted = 0;
    std::vector<uint32_t> turns(threads.x);
    for (uint32_t i = 0; i < threads.x; ++i) {
        turns[i] = i;
        Fiber& fiber = *fibers[i];
        fiber.begun = fiber.done = false;
        fiber.groups.assign(1, {});
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = stack_bytes;
        makecontext(&fiber.start, run_thread, 0);
    }
    for (uint32_t idle = 0; alive;) {
        const uint64_t before = progress;
        std::shuffle(turns.begin(), turns.end(), order);
        for (const uint32_t i : turns) {
            if (!fibers[i]->done && order() % 3) resume(i);
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
    std::shuffle(turns.begin(), turns.end(), order);
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
    Warp& warp = warps[thread.x / 32];
    const uint64_t turn = warp.turn;
    char* const shown = warp.shown[turn % 2];
    std::memcpy(shown + thread.x % 32 * most_bytes, mine, bytes);
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.turn;
        ++progress;
    }
    while (warp.turn == turn) pause();
    return shown;
}

int barrier(bool counts) {
    const uint64_t turn = barriers;
    counted += counts;
    ++at_barrier;
    open_barrier();
    while (barriers == turn) pause();
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
