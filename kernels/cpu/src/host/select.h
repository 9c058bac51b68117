// Selection of the best blocks of one (row, KV head). Specification: block_scores and select_blocks in
// sglang_hybrid/ops/reference.py.
#pragma once

#include <cstdint>

namespace sglang_hybrid {

// Sink, recent and last block are always selected.
struct SelectionRules {
    uint32_t limit;   // blocks to select, more than sink + recent
    uint32_t sink;    // number of first blocks always selected
    uint32_t recent;  // number of blocks before the last one always selected
};

// Write the `limit` positions of the selected blocks, ascending. `blocks` must be above `limit`. estimates [group][blocks]:
// logarithms of attention mass, overwritten.
void select_blocks(float* estimates, uint32_t group, uint32_t blocks, const SelectionRules& rules, uint32_t* positions);

}  // namespace sglang_hybrid
