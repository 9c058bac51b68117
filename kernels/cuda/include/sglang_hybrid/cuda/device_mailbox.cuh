// The mailbox as kernels access it: addresses of its parts, waiting for a reply, and the reply's outcome. mailbox.h says what
// is written in which order.
#pragma once

#include <cstddef>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t pause_ns = 100;  // between two polls of a reply; a poll itself crosses PCIe
inline constexpr uint32_t looks_per_gone = 16;  // polls of a reply for one poll of whether the worker is gone

// -- where things are --------------------------------------------------------------------------------------------------

class DeviceMailbox {
  public:
    __device__ DeviceMailbox(uint64_t address, const Geometry& geometry, const MailboxLayout& layout)
        : geometry_(geometry), at_(layout), base_(reinterpret_cast<char*>(address)) {}

    __device__ Bell& bell() const { return *reinterpret_cast<Bell*>(base_ + at_.bell); }
    __device__ WorkerLine& worker() const { return *reinterpret_cast<WorkerLine*>(base_ + at_.worker); }
    __device__ ClientLine& client() const { return *reinterpret_cast<ClientLine*>(base_ + at_.client); }
    __device__ Post& post(uint64_t sequence) const {
        return reinterpret_cast<Post*>(base_ + at_.posts)[sequence % mailbox_slots];
    }
    __device__ Request& request(uint64_t sequence, uint32_t row) const {
        return *of_row<Request>(at_.requests, sequence, row, 1);
    }
    __device__ Reply& reply(uint64_t sequence, uint32_t row) const { return *of_row<Reply>(at_.replies, sequence, row, 1); }
    __device__ List* lists(uint64_t sequence, uint32_t row) const {
        return of_row<List>(at_.lists, sequence, row, geometry_.kv_heads);
    }
    __device__ uint32_t* pages(uint64_t sequence, uint32_t row, uint32_t head) const {
        return of_list(at_.pages, sequence, row, head);
    }
    // Only if the geometry has masks.
    __device__ uint32_t* masks(uint64_t sequence, uint32_t row, uint32_t head) const {
        return of_list(at_.masks, sequence, row, head);
    }
    // Weights [max_blocks][32] of one query head; only if the geometry has value sums.
    __device__ float* weights(uint64_t sequence, uint32_t row, uint32_t head) const {
        const uint64_t per_head = uint64_t{geometry_.max_blocks} * block_tokens;
        return of_row<float>(at_.weights, sequence, row, heads() * per_head) + head * per_head;
    }
    __device__ uint4* query(uint64_t sequence, uint32_t row) const {
        return reinterpret_cast<uint4*>(of_row<char>(at_.queries, sequence, row, query_row_bytes()));
    }
    __device__ const float4* output(uint64_t sequence, uint32_t row) const {
        return reinterpret_cast<const float4*>(of_row<float>(at_.outputs, sequence, row, heads() * geometry_.head_dim));
    }
    __device__ const float* lse(uint64_t sequence, uint32_t row) const {
        return of_row<float>(at_.lses, sequence, row, heads());
    }

    __device__ uint64_t heads() const { return uint64_t{geometry_.kv_heads} * geometry_.group; }
    __device__ uint64_t query_row_bytes() const {
        const auto dtype = static_cast<DType>(geometry_.dtype);
        return heads() * geometry_.head_dim * (dtype == DType::fp32 || dtype == DType::fp8_fp32 ? 4 : 2);
    }

  private:
    __device__ uint32_t* of_list(uint64_t array, uint64_t sequence, uint32_t row, uint32_t head) const {
        const uint64_t per_row = uint64_t{geometry_.kv_heads} * geometry_.max_blocks;
        return of_row<uint32_t>(array, sequence, row, per_row) + uint64_t{head} * geometry_.max_blocks;
    }

    template <class T>
    __device__ T* of_row(uint64_t array, uint64_t sequence, uint32_t row, uint64_t per_row) const {
        const uint64_t index = sequence % mailbox_slots * geometry_.rows + row;
        return reinterpret_cast<T*>(base_ + array) + index * per_row;
    }

    const Geometry& geometry_;
    const MailboxLayout& at_;
    char* const base_;
};

// The numbers of a row that are stored behind the receipt: blocks in all lists, then blocks of each list.
__device__ inline uint32_t* lists_of(sh_receipt* receipt, uint32_t row, uint32_t kv_heads) {
    return reinterpret_cast<uint32_t*>(receipt + 1) + uint64_t{row} * (1 + kv_heads);
}
__device__ inline const uint32_t* lists_of(const sh_receipt* receipt, uint32_t row, uint32_t kv_heads) {
    return reinterpret_cast<const uint32_t*>(receipt + 1) + uint64_t{row} * (1 + kv_heads);
}

// -- replies -----------------------------------------------------------------------------------------------------------

// Wait until there is a reply to this post, the deadline has passed, or the host says that the worker is gone. Generation and
// status of the reply are not checked here. `waited_ns` stays 0 if the reply is there already. Called by one thread.
__device__ inline sh_mailbox_outcome wait_for_sequence(const sh_mailbox_wait& args, const DeviceMailbox& mailbox, uint32_t row,
                                                       uint64_t& waited_ns) {
    const uint64_t sequence = args.receipt->sequence;
    const Reply& reply = mailbox.reply(sequence, row);
    uint64_t found = load_acquire(reply.sequence);
    // a post that does not exist yet has no reply: a larger number is damage, which waiting would not repair
    if (found < sequence) {
        auto* const late = reinterpret_cast<unsigned long long*>(&args.state->late);
        const uint64_t start = now_ns(), patience = atomicAdd(late, 0ull) ? 0 : args.deadline_ns;
        for (uint32_t looks = 1; (found = load_acquire(reply.sequence)) < sequence; ++looks) {
            const bool is_gone = looks % looks_per_gone == 0 && load_acquire(mailbox.client().gone);
            waited_ns = now_ns() - start;
            if (is_gone || waited_ns >= patience) {
                atomicExch(late, sequence);
                return sh_row_late;
            }
            __nanosleep(pause_ns);
        }
        waited_ns = now_ns() - start;
    }
    return found == sequence ? sh_row_served : sh_row_damaged;
}

// Return generation and status, which are next to each other, with one load.
__device__ inline uint2 load_fields(const Reply& reply) {
    static_assert(offsetof(Reply, generation) % sizeof(uint2) == 0);
    static_assert(offsetof(Reply, status) == offsetof(Reply, generation) + sizeof(uint32_t));
    return *reinterpret_cast<const uint2*>(&reply.generation);
}

__device__ inline sh_mailbox_outcome outcome_of(uint2 fields, uint32_t generation) {
    if (fields.x != generation) return sh_row_damaged;
    switch (static_cast<ReplyStatus>(fields.y)) {
        case ReplyStatus::answered: return sh_row_served;
        case ReplyStatus::empty: return sh_row_empty;
        default: return sh_row_refused;
    }
}

}  // namespace sglang_hybrid::cuda
