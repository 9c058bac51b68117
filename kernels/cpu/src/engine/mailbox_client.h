// The scheduler's side of the mailbox, for a scheduler whose tensors are in host memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/mailbox_view.h"
#include "sglang_hybrid/c_api.h"

namespace sglang_hybrid {

// Empty if the lists fit the geometry, else what is wrong with them.
std::string problem_of(const sh_lists& lists, const Geometry& geometry);

// Blocks of one (row, KV head), whose entries are a prefix of its `listed` places.
List list_of(const sh_lists& lists, const Geometry& geometry, uint32_t row, uint32_t head);

class MailboxClient {
  public:
    MailboxClient(void* mailbox, const Geometry& geometry) : view(mailbox, geometry), lists_(geometry.kv_heads) {}

    // The lists must have no problem. Returns the post's sequence number.
    uint64_t post(const sh_lists& lists, uint32_t generation);
    uint32_t collect(uint64_t sequence, uint64_t timeout_ns, const uint32_t* gone, float* out, float* lse, uint8_t* served);
    void wake();

    const MailboxView view;

  private:
    void write_request(const sh_lists& lists, uint64_t sequence, uint32_t row, uint32_t generation);
    void write_weights(const sh_lists& lists, uint64_t sequence, uint32_t row, uint32_t head, uint32_t count);
    bool is_settled(uint64_t sequence, uint32_t row) const;
    bool copy_row(uint64_t sequence, uint32_t row, float* out, float* lse) const;

    std::vector<List> lists_;  // of the row that is written
    uint64_t posted_ = 0;
    bool outlasted_spinning_ = false;  // the last collect waited for longer than it is worth to spin
    struct {
        uint64_t sequence = 0;
        uint32_t rows = 0;
        uint32_t generation = 0;
        std::vector<uint64_t> checks;  // of each row; 0 where it has no blocks
    } posts_[mailbox_slots];
};

}  // namespace sglang_hybrid
