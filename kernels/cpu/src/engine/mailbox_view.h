// Typed access to a mapped mailbox. Offsets come from a private copy of the geometry, never from shared memory.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/mailbox.h"

namespace sglang_hybrid {

class MailboxView {
  public:
    MailboxView(void* mailbox, const Geometry& geometry)
        : geometry(geometry), base_(static_cast<char*>(mailbox)), at_(layout_of(geometry)) {}

    const Geometry geometry;

    Bell& bell() const { return *reinterpret_cast<Bell*>(base_ + at_.bell); }
    WorkerLine& worker() const { return *reinterpret_cast<WorkerLine*>(base_ + at_.worker); }
    ClientLine& client() const { return *reinterpret_cast<ClientLine*>(base_ + at_.client); }
    Post& post(uint64_t sequence) const { return reinterpret_cast<Post*>(base_ + at_.posts)[sequence % mailbox_slots]; }
    Request& request(uint64_t sequence, uint32_t row) const { return at<Request>(at_.requests, sequence, row, 1)[0]; }
    Reply& reply(uint64_t sequence, uint32_t row) const { return at<Reply>(at_.replies, sequence, row, 1)[0]; }
    uint64_t& check(uint64_t sequence, uint32_t row) const { return at<uint64_t>(at_.checks, sequence, row, 1)[0]; }
    List* lists(uint64_t sequence, uint32_t row) const { return at<List>(at_.lists, sequence, row, geometry.kv_heads); }
    uint32_t* pages(uint64_t sequence, uint32_t row, uint32_t head) const { return of_list(at_.pages, sequence, row, head); }
    // Only if the geometry has masks.
    uint32_t* masks(uint64_t sequence, uint32_t row, uint32_t head) const { return of_list(at_.masks, sequence, row, head); }
    char* query(uint64_t sequence, uint32_t row, uint32_t head) const {
        return at<char>(at_.queries, sequence, row, query_row_bytes()) + head * (query_row_bytes() / geometry.kv_heads);
    }
    // [group][max_blocks][32]; only if the geometry has value sums.
    float* weights(uint64_t sequence, uint32_t row, uint32_t head) const {
        const uint64_t per_head = geometry.group * weight_stride();
        return at<float>(at_.weights, sequence, row, geometry.kv_heads * per_head) + head * per_head;
    }
    float* output(uint64_t sequence, uint32_t row, uint32_t head) const {
        return at<float>(at_.outputs, sequence, row, output_row()) + uint64_t{head} * geometry.group * geometry.head_dim;
    }
    float* lse(uint64_t sequence, uint32_t row, uint32_t head) const {
        return at<float>(at_.lses, sequence, row, lse_row()) + uint64_t{head} * geometry.group;
    }

    uint64_t query_row_bytes() const { return output_row() * query_bytes_of(static_cast<DType>(geometry.dtype)); }
    uint64_t weight_stride() const { return uint64_t{geometry.max_blocks} * block_tokens; }
    uint64_t output_row() const { return uint64_t{geometry.kv_heads} * geometry.group * geometry.head_dim; }
    uint64_t lse_row() const { return uint64_t{geometry.kv_heads} * geometry.group; }

  private:
    uint32_t* of_list(uint64_t array, uint64_t sequence, uint32_t row, uint32_t head) const {
        const uint64_t per_row = uint64_t{geometry.kv_heads} * geometry.max_blocks;
        return at<uint32_t>(array, sequence, row, per_row) + uint64_t{head} * geometry.max_blocks;
    }

    template <class T>
    T* at(uint64_t array, uint64_t sequence, uint32_t row, uint64_t per_row) const {
        const uint64_t index = (sequence % mailbox_slots) * geometry.rows + row;
        return reinterpret_cast<T*>(base_ + array) + index * per_row;
    }

    char* base_;
    MailboxLayout at_;
};

}  // namespace sglang_hybrid
