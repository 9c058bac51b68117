// Whether a worker lives, told by the kernel the moment its lead thread is no more.
//
// The end of its connection comes late: a killed process first gives back all memory that it had mapped, which takes 100 ms
// for a gigabyte of small pages. A robust mutex that the lead thread holds is marked before that. Its owner is the worker
// alone; the other side looks at one word of it and sleeps on that, and follows no pointer in shared memory.
#pragma once

#include <linux/futex.h>
#include <pthread.h>

#include "sglang_hybrid/mailbox.h"
#include "worker/flags.h"

namespace sglang_hybrid {

static_assert(sizeof(pthread_mutex_t) <= sizeof(WorkerLine::life));

// In the worker, on the stack of the thread whose life it is.
class Life {
public:
    explicit Life(WorkerLine& line) : mutex_(reinterpret_cast<pthread_mutex_t*>(line.life)) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutex_init(mutex_, &kind);
        pthread_mutexattr_destroy(&kind);
        pthread_mutex_lock(mutex_);
    }
    ~Life() { pthread_mutex_unlock(mutex_); }
    Life(const Life&) = delete;

private:
    pthread_mutex_t* const mutex_;
};

// In the client: wait until the thread that held it has ended, however; false: the time is over. The word that counts is
// the first of the mutex, as the kernel's interface for robust futexes wants it: the owner's thread id and two flags. The
// kernel wakes one who waits: let there be one.
inline bool wait_for_end(WorkerLine& line, uint64_t timeout_ns) {
    uint32_t& word = *reinterpret_cast<uint32_t*>(line.life);
    const uint64_t deadline = now_ns() + timeout_ns;
    for (uint64_t now; (now = now_ns()) < deadline;) {
        const uint32_t seen = __atomic_or_fetch(&word, FUTEX_WAITERS, __ATOMIC_SEQ_CST);  // else nobody wakes us
        if ((seen & FUTEX_OWNER_DIED) || (seen & FUTEX_TID_MASK) == 0) return true;
        sleep_on(word, seen, deadline - now);
    }
    return false;
}

}  // namespace sglang_hybrid
