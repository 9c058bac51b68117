// Posts for providers that compute outside of this library. Posts are taken one at a time, as private and checked copies.
#pragma once

#include <vector>

#include "engine/post_reader.h"

namespace sglang_hybrid {

class ExternalJobs {
  public:
    ExternalJobs(void* mailbox, const Geometry& geometry, uint32_t spin_us);

    // Wait up to `timeout_ns` for a post and copy it to the fields below. False: no post arrived.
    bool take(uint64_t timeout_ns);
    // Reply to the post and complete it. `out` and `lse` hold all rows [rows][KV head][group][...]; results of rows that
    // were empty, refused or never arrived are skipped.
    void answer(const float* out, const float* lse);

    PostReader reader;
    std::atomic<uint64_t> blocks{0};  // number of attended blocks
    // The copy of the post, laid out like sh_job.
    OpenPost post;
    std::vector<char> query;
    std::vector<uint32_t> count, last_fill, pages, masks;  // masks: empty if the geometry has no masks
    std::vector<float> weights;                          // empty if the geometry has no value sums

  private:
    void copy_weights(uint32_t row);
    bool read_row(uint32_t row, const Request& request);

    std::vector<uint32_t> generations_;
    std::vector<uint64_t> checks_;  // checksum of each row's inputs
    std::vector<char> wanted_;  // 1 for each row that answer() has to reply to
    std::vector<List> lists_;
    const std::atomic<bool> never_{false};
};

}  // namespace sglang_hybrid
