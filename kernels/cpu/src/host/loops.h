// The inner loops that a host without a GPU needs around attention: computing digests and sketches of blocks, and estimating
// attention from them.
//
// Specifications in sglang_hybrid/ops/reference.py: minmax_digest, sketch_codes (4 bits), sketch_logits, digest_logits.
// Block: 32 keys of one KV head. Digest: [2][head_dim], maximum first, of the keys' dtype. Codes: [32][channels / 2]
// bytes, each with two channels, the first one in the low bits.
#pragma once

#include <cstdint>

#include "sglang_hybrid/block_attention.h"

namespace sglang_hybrid {

// The query heads of one (row, KV head), prepared once for the estimates of all blocks. The caller owns all arrays.
struct EstimateQuery {
    DType dtype;  // of digests
    uint32_t group, head_dim, channels;
    float scale;
    const float* query;        // [group][head_dim]; without sketches, the factors of a digest's maximum
    const float* lower;        // [group][head_dim], used without sketches: the factors of a digest's minimum
    const float* asked;        // [group][channels]: the query's sketch channels times scale; even channels, then odd ones
    const uint32_t* position;  // [channels]: index of each sketch channel in a key; even channels, then odd ones
};

// The loops compiled for one instruction set.
struct HostLoops {
    const char* name;
    // Computes the digest of a block's first `filled` keys. A channel that is not finite in some key gets NaN.
    void (*digest)(DType dtype, const char* keys, uint32_t filled, uint32_t head_dim, char* digest);
    // Computes the sketch of all 32 keys; `position` [channels]: index of each sketch channel in a key.
    void (*codes)(DType dtype, const char* keys, const char* digest, const uint32_t* position, uint32_t channels,
                  uint32_t head_dim, uint8_t* codes);
    // Estimates the logarithm of a block's attention mass: out[group]. `codes` is null without sketches. The estimate is
    // NaN for a block with keys that are not finite.
    void (*estimate)(const EstimateQuery& query, const char* digest, const uint8_t* codes, float* out);
    // Converts `count` numbers, a multiple of 32.
    void (*to_floats)(DType dtype, const char* from, uint32_t count, float* to);
};

extern const HostLoops portable_loops;
extern const HostLoops avx2_loops;
extern const HostLoops avx512_loops;

// Return the fastest loops that this machine can run, limited by SGLANG_HYBRID_CPU_VARIANT.
const HostLoops& host_loops();

}  // namespace sglang_hybrid
