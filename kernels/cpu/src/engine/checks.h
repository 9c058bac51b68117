// The checksum of what a row's answer was computed from: layer, kind, scale, lists, page numbers and masks. The client
// computes the same checksum from what it posted, and compares.
//
// The checksum is the sum of every number times an odd factor for the number's position, modulo 2^64. One flipped bit always
// changes the sum, and parts of it can be added up in any order by any thread.
#pragma once

#include <bit>
#include <cstdint>

#include "sglang_hybrid/mailbox.h"

namespace sglang_hybrid {

inline uint64_t check_of(uint64_t number, uint64_t place) { return number * (0x9e3779b97f4a7c15u * (2 * place + 1)); }

inline uint64_t check_of_post(uint32_t layer, float scale, PostKind kind) {
    return check_of(layer | uint64_t{static_cast<uint32_t>(kind)} << 32, 0) + check_of(std::bit_cast<uint32_t>(scale), 1);
}

inline uint64_t check_of_list(const Geometry& g, uint32_t head, List list) {
    const uint64_t first = 2 + uint64_t{head} * (uint64_t{g.max_blocks} + 2);
    // an empty list has no last block
    return check_of(list.count, first) + check_of(list.count ? list.last_fill : 0, first + 1);
}

inline uint64_t check_of_page(const Geometry& g, uint32_t head, uint32_t place, uint32_t page) {
    return check_of(page, 4 + uint64_t{head} * (uint64_t{g.max_blocks} + 2) + place);
}

// Masks have the positions behind those of all lists.
inline uint64_t check_of_mask(const Geometry& g, uint32_t head, uint32_t place, uint32_t mask) {
    const uint64_t first = 2 + uint64_t{g.kv_heads} * (uint64_t{g.max_blocks} + 2);
    return check_of(mask, first + uint64_t{head} * g.max_blocks + place);
}

}  // namespace sglang_hybrid
