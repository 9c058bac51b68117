// C interface of the CUDA library for policies that decide by attention weights of single tokens. Conventions as in c_api.h.
#pragma once

#include <cstdint>

// Compute q . k of quantised keys, as `lookup_logits` of the reference does. A list is one query head of a batch entry.
struct sh_lookup_logits {
    const float* tables;  // [list][groups][centroids]
    const void* codes;  // [KV head of a batch entry][tokens][groups], indices of `index_bytes` each
    float* logits;  // [list][tokens]
    uint32_t lists;
    uint32_t group;  // lists that have the same codes: query heads per KV head
    uint32_t groups;  // parts of a key
    uint32_t centroids;
    uint32_t tokens;
    uint32_t index_bytes;  // 1 or 2
};

// Mark the fewest entries of each list whose weights add up to share `least` of all, as `cumulative_share` of the reference
// does.
struct sh_cumulative_share {
    const float* weights;  // [list][entries], not negative
    void* kept;  // [list][entries] of bool
    float least;
    uint32_t lists;
    uint32_t entries;
    uint32_t unused;
};
