// Attention of one token's query heads over a list of KV blocks, and its two halves: the operations that variants implement.
//
// The specifications are `attend_blocks` in sglang_hybrid/ops/reference.py, `token_weights` and `sum_values` in
// reference_weights.py; these are the operations for one (row, KV head).
#pragma once

#include <cstdint>

namespace sglang_hybrid {

// Of a pool and of the queries that attend to it: the same, or FP8 with queries of the model's dtype. FP8 is e4m3 without
// infinities, torch's float8_e4m3fn.
enum class DType : uint32_t { bf16 = 0, fp16 = 1, fp32 = 2, fp8_bf16 = 3, fp8_fp16 = 4, fp8_fp32 = 5 };

inline constexpr DType last_dtype = DType::fp8_fp32;
// What code is compiled for that reads FP8, whatever the queries are.
inline constexpr DType fp8 = DType::fp8_fp32;

inline constexpr uint32_t block_tokens = 32;
inline constexpr uint32_t max_group = 16;
inline constexpr uint32_t max_head_dim = 256;

constexpr bool is_fp8(DType dtype) { return dtype >= DType::fp8_bf16; }

// The dtype of queries; for anything but FP8 that of the pool.
constexpr DType query_dtype(DType dtype) {
    return is_fp8(dtype) ? static_cast<DType>(static_cast<uint32_t>(dtype) - static_cast<uint32_t>(DType::fp8_bf16)) : dtype;
}

// Bytes of one number of the pool.
constexpr uint32_t bytes_of(DType dtype) { return is_fp8(dtype) ? 1 : dtype == DType::fp32 ? 4 : 2; }

constexpr uint32_t query_bytes_of(DType dtype) { return bytes_of(query_dtype(dtype)); }

constexpr bool is_head_dim(uint32_t dim) { return dim == 64 || dim == 96 || dim == 128 || dim == 256; }

// One KV head of one row. Block i of the list is at `keys + pages[i] * page_stride`: 32 tokens of head_dim values,
// contiguous. Pointers to pools and queries are aligned to 64 bytes; `out` and `lse` to 4.
struct BlockAttention {
    const void* query;     // [group][head_dim], of query_dtype(dtype)
    const char* keys;      // this KV head in page 0
    const char* values;    // likewise
    uint64_t page_stride;  // bytes from a page to the next, the same for keys and values
    const uint32_t* pages; // checked by the caller: a kernel follows them blindly
    const uint32_t* masks; // of each block, bit t: token t counts; or null: all do. For attend(): kernels do not look at it
    uint32_t count;        // blocks in the list, may be 0
    uint32_t last_fill;    // tokens in the last block, 1 to 32; what is behind them may be anything, NaN included
    uint32_t group;        // query heads, 1 to 16
    uint32_t head_dim;     // of keys and of values
    DType dtype;
    float scale;           // of the logits
    float* out;            // [group][head_dim]; not written when the list is empty
    float* lse;            // [group], natural logarithm; -inf when the list is empty
    const BlockAttention* next;  // the call after this one, or null: its first blocks are fetched while this one ends
};

using Kernel = void (*)(const BlockAttention&);

// The kernel's operation over the tokens that count. Where no token does, the list counts as empty.
void attend(Kernel kernel, const BlockAttention& work);

// The kernel for a shape. `variant` is a name of `variants()`, or null for the fastest that this machine has (or what
// the environment variable SGLANG_HYBRID_CPU_VARIANT names). A variant that has nothing special for a dtype uses the
// next simpler one. Returns null where the shape is not supported or the variant is not available on this machine.
Kernel find_kernel(DType dtype, uint32_t head_dim, const char* variant);

// Sums of a list's values by weights that somebody else computed; no key is read.
struct ValueSum {
    const float* weights;    // [group][count][32], heads weight_stride apart. A token whose weights are all 0 is not read
    uint64_t weight_stride;  // in floats
    const char* values;      // the rest as for BlockAttention
    uint64_t page_stride;
    const uint32_t* pages;
    uint32_t count;
    uint32_t group;
    uint32_t head_dim;
    DType dtype;
    float* out;  // [group][head_dim]; 0 where the list is empty
};

using SumKernel = void (*)(const ValueSum&);

// Attention weights of a list's tokens: exp(logit - LSE) to weights [group][count][32], heads `stride` floats apart; 0 where
// no token counts, and where the LSE is -inf. `work.lse` is read, of all tokens that the weights are shares of; `work.out`
// and `work.next` are not looked at.
using WeightKernel = void (*)(const BlockAttention& work, float* weights, uint64_t stride);

// As find_kernel.
SumKernel find_sum_kernel(DType dtype, uint32_t head_dim, const char* variant);
WeightKernel find_weight_kernel(DType dtype, uint32_t head_dim, const char* variant);

// The variants that this machine can run, fastest first, separated by commas: such as "amx,avx512,avx2,portable".
const char* variants();

// The name of the variant that find_kernel(dtype, head_dim, variant) ends up with, null where it returns null.
const char* variant_name(DType dtype, uint32_t head_dim, const char* variant);

}  // namespace sglang_hybrid
