// The client's side of the mailbox, for a scheduler process whose tensors are in host memory. A GPU client has its own code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/mailbox_view.h"
#include "sglang_hybrid/c_api.h"

namespace sglang_hybrid {

// Return an empty string if the lists fit the geometry, else a sentence that says what is wrong with them.
std::string problem_of(const sh_lists& lists, const Geometry& geometry);

// Return the length of the block list of one (row, KV head): its entries before the first page below 0.
List list_of(const sh_lists& lists, const Geometry& geometry, uint32_t row, uint32_t head);

class MailboxClient {
  public:
    MailboxClient(void* mailbox, const Geometry& geometry) : view(mailbox, geometry), lists_(geometry.kv_heads) {}

    // Post lists that problem_of has checked. Returns the sequence number of the post.
    uint64_t post(const sh_lists& lists, uint32_t generation);
    // See sh_client_collect and sh_client_wake in c_api.h.
    uint32_t collect(uint64_t sequence, uint32_t rows, uint64_t timeout_ns, const uint32_t* gone, float* out, float* lse,
                     uint8_t* served);
    void wake();

    const MailboxView view;

  private:
    void write_request(const sh_lists& lists, uint64_t sequence, uint32_t row, uint32_t generation);
    void write_weights(const sh_lists& lists, uint64_t sequence, uint32_t row, uint32_t head, uint32_t count);
    bool is_settled(uint64_t sequence, uint32_t row) const;
    bool copy_row(uint64_t sequence, uint32_t row, float* out, float* lse) const;

    std::vector<List> lists_;  // of the row being written
    uint64_t posted_ = 0;      // sequence number of the last post
    bool outlasted_spinning_ = false;  // the last collect() waited for longer than spin_ns
    // The last post in each slot of the mailbox.
    struct {
        uint64_t sequence = 0;
        uint32_t rows = 0;
        uint32_t generation = 0;
        std::vector<uint64_t> checks;  // expected checksum of each row; 0 if the row has no blocks
    } posts_[mailbox_slots];
};

}  // namespace sglang_hybrid
