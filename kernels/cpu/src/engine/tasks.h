// How a block list is split into tasks, and how the tasks' partial results are merged. Both depend on the list alone, never on
// threads or timing, so that the worker and the server compute the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/mailbox.h"

namespace sglang_hybrid {

inline constexpr uint32_t most_tasks_per_list = 64;

struct Split {
    uint32_t size;   // blocks of each task except the last, which may have fewer
    uint32_t tasks;
};

// Return count / size, rounded up. Written without a sum, which could overflow: `size` may be larger than any list.
inline uint32_t rounded_up(uint32_t count, uint32_t size) { return count / size + (count % size != 0); }

inline Split split_list(uint32_t count, uint32_t task_blocks) {
    const uint32_t size = std::max(task_blocks, rounded_up(count, most_tasks_per_list));
    return {size, rounded_up(count, size)};
}

// Return the most tasks that a list of up to `most_blocks` blocks can have. The longest list need not have the most tasks:
// with task_blocks = 1, 65 blocks make 33 tasks of two, 64 blocks make 64 tasks of one.
inline uint32_t most_tasks_of(uint32_t most_blocks, uint32_t task_blocks) {
    return std::min(most_tasks_per_list, rounded_up(most_blocks, task_blocks));
}

// Partial results of a list's tasks: out [task][group][head_dim] and lse [task][group].
struct Partials {
    float* out;
    float* lse;
};

inline uint64_t partial_out_floats(const Geometry& g) { return uint64_t{g.group} * g.head_dim; }

// Merge the tasks' results into the attention over all their tokens: out [group][head_dim], lse [group]. If the LSEs of all
// tasks are -inf (no tokens), the merged LSE is -inf and no output is written.
inline void merge_partials(const Geometry& g, const Partials& parts, uint32_t tasks, float* out, float* lse) {
    for (uint32_t head = 0; head < g.group; ++head) {
        constexpr float nothing = -std::numeric_limits<float>::infinity();
        float largest = nothing;
        bool has_tokens = false;
        for (uint32_t task = 0; task < tasks; ++task) {
            const float of_task = parts.lse[task * g.group + head];
            largest = std::max(largest, of_task);
            has_tokens |= of_task != nothing;  // true for NaN
        }
        if (!has_tokens) {
            lse[head] = nothing;
            continue;
        }
        float* const result = out + uint64_t{head} * g.head_dim;
        std::fill_n(result, g.head_dim, 0.0f);
        float sum = 0;
        for (uint32_t task = 0; task < tasks; ++task) {
            // masks may leave a task without tokens, whose output is not written
            if (parts.lse[task * g.group + head] == nothing) continue;
            const float weight = std::exp(parts.lse[task * g.group + head] - largest);
            const float* const part = parts.out + task * partial_out_floats(g) + uint64_t{head} * g.head_dim;
            for (uint32_t d = 0; d < g.head_dim; ++d) result[d] += weight * part[d];
            sum += weight;
        }
        const float share = 1 / sum;
        for (uint32_t d = 0; d < g.head_dim; ++d) result[d] *= share;
        lse[head] = largest + std::log(sum);
    }
}

// Add up the tasks' sums of values. The LSE of a sum is 0 by definition, so there is none to merge.
inline void add_partial_sums(const Geometry& g, const Partials& parts, uint32_t tasks, float* out) {
    const uint64_t floats = partial_out_floats(g);
    std::copy_n(parts.out, floats, out);
    for (uint32_t task = 1; task < tasks; ++task) {
        for (uint64_t i = 0; i < floats; ++i) out[i] += parts.out[task * floats + i];
    }
}

// The kernels that compute posts of every kind.
struct Kernels {
    Kernel attend;
    SumKernel sum;
};

// Return the arguments of a value sum over the blocks of `attention`, with weights instead of query and keys.
inline ValueSum sum_of(const BlockAttention& attention, const float* weights, uint64_t weight_stride) {
    return {weights,         weight_stride,   attention.values,   attention.page_stride, attention.pages,
            attention.count, attention.group, attention.head_dim, attention.dtype,       attention.out};
}

// Return the arguments of attention for one (layer, KV head). The caller sets the block list, `out` and `lse`.
inline BlockAttention attention_of(const Geometry& g, const char* pool, uint32_t layer, uint32_t head, const void* query,
                                   float scale) {
    const uint64_t block = uint64_t{block_tokens} * g.head_dim * bytes_of(static_cast<DType>(g.dtype));
    const uint64_t start = layer * g.layer_stride + head * block;
    BlockAttention task{};
    task.query = query;
    task.keys = pool + g.keys + start;
    task.values = pool + g.values + start;
    task.page_stride = block * g.kv_heads;
    task.group = g.group;
    task.head_dim = g.head_dim;
    task.dtype = static_cast<DType>(g.dtype);
    task.scale = scale;
    return task;
}

}  // namespace sglang_hybrid
