// The best blocks of one (row, KV head). Specification: block_scores and select_blocks in sglang_hybrid/ops/reference.py.
#pragma once

#include <cstdint>

namespace sglang_hybrid {

struct SelectionRules {
    uint32_t limit;   // blocks; holds all that are always in
    uint32_t sink;    // first blocks, always in
    uint32_t recent;  // blocks before the last one, always in; so is the last one
};

// estimates [group][blocks]: logarithms of attention mass, changed in place. Writes `limit` positions, ascending;
// there are more blocks than that.
void select_blocks(float* estimates, uint32_t group, uint32_t blocks, const SelectionRules& rules, uint32_t* positions);

}  // namespace sglang_hybrid
