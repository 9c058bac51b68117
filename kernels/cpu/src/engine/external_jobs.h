// Posts for providers that compute outside of this library: taken one at a time, as private and checked copies.
#pragma once

#include <vector>

#include "engine/post_reader.h"

namespace sglang_hybrid {

class ExternalJobs {
  public:
    ExternalJobs(void* mailbox, const Geometry& geometry, uint32_t spin_us);

    bool take(uint64_t timeout_ns);  // false: no post in that time
    // Results of every row [rows][KV head][group][...], also of the rows that are skipped because they were refused.
    void answer(const float* out, const float* lse);

    PostReader reader;
    std::atomic<uint64_t> blocks{0};  // attended
    OpenPost post;
    std::vector<char> query;
    std::vector<uint32_t> count, last_fill, pages, masks;  // masks: empty where the geometry has none
    std::vector<float> weights;                          // likewise

  private:
    void copy_weights(uint32_t row);
    bool read_row(uint32_t row, const Request& request);

    std::vector<uint32_t> generations_;
    std::vector<uint64_t> checks_;  // of what was read of each row
    std::vector<char> wanted_;  // rows that answer() has to reply to
    std::vector<List> lists_;
    const std::atomic<bool> never_{false};
};

}  // namespace sglang_hybrid
