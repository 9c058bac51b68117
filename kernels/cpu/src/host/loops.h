// The inner loops of what the host does around attention: digests and sketches of blocks, and estimates from them.
//
// Specifications in sglang_hybrid/ops/reference.py: minmax_digest, sketch_codes (4 bits), sketch_logits, digest_logits.
// Block: 32 keys of one KV head. Digest: [2][head_dim], maximum first, of the keys' dtype. Codes: [32][channels / 2]
// bytes, of two channels the first in the low bits.
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {

// The query heads of one (row, KV head), prepared once for all blocks. All arrays belong to the caller.
struct EstimateQuery {
    DType dtype;  // of digests
    uint32_t group, head_dim, channels;
    float scale;
    const float* query;        // [group][head_dim]; without sketches what is multiplied with the maximum
    const float* lower;        // [group][head_dim], without sketches only: what is multiplied with the minimum
    const float* asked;        // [group][channels] of the sketch, times the scale; even channels, then odd ones
    const uint32_t* position;  // [channels] in a key, likewise even ones first
};

struct HostLoops {
    const char* name;
    // of the first `filled` keys. Keys that are not finite make a digest of NaN.
    void (*digest)(DType dtype, const char* keys, uint32_t filled, uint32_t head_dim, char* digest);
    // of all 32 keys; `position` [channels] in a key
    void (*codes)(DType dtype, const char* keys, const char* digest, const uint32_t* position, uint32_t channels,
                  uint32_t head_dim, uint8_t* codes);
    // Logarithm of a block's attention mass by estimate: out[group]. `codes` is null without sketches. NaN for a block
    // with keys that are not finite.
    void (*estimate)(const EstimateQuery& query, const char* digest, const uint8_t* codes, float* out);
    void (*to_floats)(DType dtype, const char* from, uint32_t count, float* to);  // count: a multiple of 32
};

extern const HostLoops portable_loops;
extern const HostLoops avx2_loops;
extern const HostLoops avx512_loops;

// The fastest that this machine has.
const HostLoops& host_loops();

}  // namespace sglang_hybrid
