// How one list of blocks becomes tasks, and tasks become one result. Depends on the list alone, never on threads or on
// time, so that the worker and a process that computes by itself give the same bits.
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
    uint32_t size;   // blocks of each task but the last
    uint32_t tasks;
};

// Without a sum that overflows: a task may be larger than any list.
inline uint32_t rounded_up(uint32_t count, uint32_t size) { return count / size + (count % size != 0); }

inline Split split_list(uint32_t count, uint32_t task_blocks) {
    const uint32_t size = std::max(task_blocks, rounded_up(count, most_tasks_per_list));
    return {size, rounded_up(count, size)};
}

// The most tasks that a list of up to `most_blocks` can have. Not those of the longest one: 65 blocks make 33 tasks of
// two, 64 make 64 of one.
inline uint32_t most_tasks_of(uint32_t most_blocks, uint32_t task_blocks) {
    return std::min(most_tasks_per_list, rounded_up(most_blocks, task_blocks));
}

// Results of a list's tasks, one after the other: [task][group][head_dim] and [task][group].
struct Partials {
    float* out;
    float* lse;
};

inline uint64_t partial_out_floats(const Geometry& g) { return uint64_t{g.group} * g.head_dim; }

// Attention over the union of the tasks' tokens. Where no task has any, all of whose LSEs are -inf then, that of the union
// is too, and no output is written.
inline void merge_partials(const Geometry& g, const Partials& parts, uint32_t tasks, float* out, float* lse) {
    for (uint32_t head = 0; head < g.group; ++head) {
        constexpr float nothing = -std::numeric_limits<float>::infinity();
        float largest = nothing;
        bool has_tokens = false;
        for (uint32_t task = 0; task < tasks; ++task) {
            const float of_task = parts.lse[task * g.group + head];
            largest = std::max(largest, of_task);
            has_tokens |= of_task != nothing;  // NaN is not nothing
        }
        if (!has_tokens) {
            lse[head] = nothing;
            continue;
        }
        float* const result = out + uint64_t{head} * g.head_dim;
        std::fill_n(result, g.head_dim, 0.0f);
        float sum = 0;
        for (uint32_t task = 0; task < tasks; ++task) {
            // masks may leave a task without tokens: its output was not written
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

// The same for sums of values: each task has a part of them. LSEs of sums are 0: there is something.
inline void add_partial_sums(const Geometry& g, const Partials& parts, uint32_t tasks, float* out) {
    const uint64_t floats = partial_out_floats(g);
    std::copy_n(parts.out, floats, out);
    for (uint32_t task = 1; task < tasks; ++task) {
        for (uint64_t i = 0; i < floats; ++i) out[i] += parts.out[task * floats + i];
    }
}

// What computes posts of every kind.
struct Kernels {
    Kernel attend;
    SumKernel sum;
};

// `attention` with weights in the place of query and keys.
inline ValueSum sum_of(const BlockAttention& attention, const float* weights, uint64_t weight_stride) {
    return {weights,         weight_stride,   attention.values,   attention.page_stride, attention.pages,
            attention.count, attention.group, attention.head_dim, attention.dtype,       attention.out};
}

// The kernel's arguments for blocks of one (layer, KV head); the caller fills in the list and where results go.
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
