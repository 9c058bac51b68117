// Detection of a worker's death by the operating system's kernel, at the moment the worker's lead thread ends.
//
// The end of the worker's connection comes late: a killed process first frees all memory that it mapped, which takes 100 ms
// for a gigabyte of small pages. Before that, the kernel walks the robust futex list of each thread and marks the futexes that
// the thread owns. The list has one such futex, a word in the mailbox. All pointers of the list are in the worker's own
// memory, and neither side trusts the word.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/flags.h"
#include "sglang_hybrid/mailbox.h"

namespace sglang_hybrid {

// Makes the calling thread the owner of line.life while the object exists. The worker's lead thread keeps one on its stack.
class Life {
  public:
    explicit Life(WorkerLine& line) : word_(line.life) {
        syscall(SYS_get_robust_list, 0, &before_, &before_bytes_);  // the C library's own list, restored at the end
        head_.list.next = &entry_;
        entry_.next = &head_.list;
        head_.futex_offset = reinterpret_cast<char*>(&word_) - reinterpret_cast<char*>(&entry_);
        store_release(word_, uint32_t(syscall(SYS_gettid)));
        syscall(SYS_set_robust_list, &head_, sizeof(head_));
    }
    ~Life() {
        syscall(SYS_set_robust_list, before_, before_bytes_);
        store_release(word_, 0u);
        syscall(SYS_futex, &word_, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
    Life(const Life&) = delete;

  private:
    uint32_t& word_;
    robust_list_head* before_ = nullptr;
    size_t before_bytes_ = sizeof(robust_list_head);
    robust_list entry_{};
    robust_list_head head_{};
};

// Wait in the client until the thread that owns line.life has ended for any reason. False: `timeout_ns` passed first. The word
// holds the owner's thread id and two flags. The kernel wakes only one waiter, so only one thread may wait.
inline bool wait_for_end(WorkerLine& line, uint64_t timeout_ns) {
    const uint64_t deadline = now_ns() + timeout_ns;
    for (uint64_t now; (now = now_ns()) < deadline;) {
        const uint32_t seen = __atomic_or_fetch(&line.life, FUTEX_WAITERS, __ATOMIC_SEQ_CST);  // asks for a wake
        if ((seen & FUTEX_OWNER_DIED) || (seen & FUTEX_TID_MASK) == 0) return true;
        sleep_on(line.life, seen, deadline - now);
    }
    return false;
}

}  // namespace sglang_hybrid
