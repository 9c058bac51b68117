// Attention of one token's query heads over a list of KV blocks, and the two halves of attention: token weights, and sums of
// values by given weights. Each variant (instruction set) implements these operations for one (row, KV head).
//
// The specifications are `attend_blocks` in sglang_hybrid/ops/reference.py, and `token_weights` and `sum_values` in
// reference_weights.py.
#pragma once

#include <cstdint>

namespace sglang_hybrid {

// Dtypes of a pool and of its queries: both have the same dtype, or the pool is FP8 and the queries have the model's dtype.
// FP8 is e4m3 without infinities, torch's float8_e4m3fn.
enum class DType : uint32_t { bf16 = 0, fp16 = 1, fp32 = 2, fp8_bf16 = 3, fp8_fp16 = 4, fp8_fp32 = 5 };

inline constexpr DType last_dtype = DType::fp8_fp32;
// Template argument of code that reads an FP8 pool, whatever the dtype of the queries.
inline constexpr DType fp8 = DType::fp8_fp32;

inline constexpr uint32_t block_tokens = 32;
inline constexpr uint32_t max_group = 16;
inline constexpr uint32_t max_head_dim = 256;

constexpr bool is_fp8(DType dtype) { return dtype >= DType::fp8_bf16; }

// The dtype of queries. Unless the pool is FP8, queries have the dtype of the pool.
constexpr DType query_dtype(DType dtype) {
    return is_fp8(dtype) ? static_cast<DType>(static_cast<uint32_t>(dtype) - static_cast<uint32_t>(DType::fp8_bf16)) : dtype;
}

// Bytes of one number in the pool.
constexpr uint32_t bytes_of(DType dtype) { return is_fp8(dtype) ? 1 : dtype == DType::fp32 ? 4 : 2; }

constexpr uint32_t query_bytes_of(DType dtype) { return bytes_of(query_dtype(dtype)); }

constexpr bool is_head_dim(uint32_t dim) { return dim == 64 || dim == 96 || dim == 128 || dim == 256; }

// Arguments of attention for one KV head of one row. The keys of block i of the list are at `keys + pages[i] * page_stride`:
// 32 tokens of head_dim numbers, contiguous. Pointers to pools and queries are aligned to 64 bytes; `out` and `lse` to 4.
struct BlockAttention {
    const void* query;     // [group][head_dim], of query_dtype(dtype)
    const char* keys;      // of this KV head in page 0
    const char* values;    // of this KV head in page 0
    uint64_t page_stride;  // bytes from a page to the next, the same for keys and values
    const uint32_t* pages; // [count], checked by the caller: a kernel follows them blindly
    const uint32_t* masks; // [count], bit t: token t counts; null: all count. Only attend() and weight kernels use masks
    uint32_t count;        // blocks in the list, may be 0
    uint32_t last_fill;    // tokens in the last block, 1 to 32; the memory behind them may hold anything, NaN included
    uint32_t group;        // query heads, 1 to 16
    uint32_t head_dim;     // of keys and of values
    DType dtype;
    float scale;           // of the logits
    float* out;            // [group][head_dim]; not written when the list is empty
    float* lse;            // [group], natural logarithm; -inf when the list is empty
    const BlockAttention* next;  // arguments of the following call, or null: this call prefetches its first blocks
};

using Kernel = void (*)(const BlockAttention&);

// Run `kernel` over the tokens that count by `work.masks`. A list in which no token counts is treated as empty.
void attend(Kernel kernel, const BlockAttention& work);

// Return the kernel for a shape. `variant` is a name from `variants()`, or null for the variant that the environment variable
// SGLANG_HYBRID_CPU_VARIANT names, else the fastest one of this machine. Where a variant has no kernel for the dtype, the next
// simpler variant's kernel is returned. Null: the shape is not supported, or this machine cannot run the variant.
Kernel find_kernel(DType dtype, uint32_t head_dim, const char* variant);

// Arguments of a sum of a list's values by weights that the caller computed. No key is read.
struct ValueSum {
    const float* weights;    // [group][count][32], heads weight_stride apart. A token with all weights 0 is not read
    uint64_t weight_stride;  // in floats
    const char* values;      // this field and those below: as in BlockAttention
    uint64_t page_stride;
    const uint32_t* pages;
    uint32_t count;
    uint32_t group;
    uint32_t head_dim;
    DType dtype;
    float* out;  // [group][head_dim]; 0 where the list is empty
};

using SumKernel = void (*)(const ValueSum&);

// Writes the attention weights of a list's tokens, exp(logit - LSE), to weights [group][count][32], heads `stride` floats
// apart. Weights are 0 for tokens that do not count and for heads whose LSE is -inf. `work.lse` is an input: the LSE over all
// tokens that the weights are shares of. `work.out` and `work.next` are ignored.
using WeightKernel = void (*)(const BlockAttention& work, float* weights, uint64_t stride);

// Like find_kernel, for sums and for weights.
SumKernel find_sum_kernel(DType dtype, uint32_t head_dim, const char* variant);
WeightKernel find_weight_kernel(DType dtype, uint32_t head_dim, const char* variant);

// Return the variants that this machine can run, fastest first, separated by commas: such as "amx,avx512,avx2,portable".
const char* variants();

// Return the name of the variant whose kernel find_kernel(dtype, head_dim, variant) returns, or null if there is no kernel.
const char* variant_name(DType dtype, uint32_t head_dim, const char* variant);

}  // namespace sglang_hybrid
