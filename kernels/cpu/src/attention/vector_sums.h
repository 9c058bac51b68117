// Sums of values by given weights in fp32 vectors, for any Lanes of vector_kernel.h. The sums use Vector, width, output_heads,
// output_pairs, zero, broadcast, load, store, fma, load_pair, splits and interleave of the Lanes.
#pragma once

#include <stdint.h>
#include <string.h>

#include "attention/block_list.h"
#include "attention/group_parts.h"

namespace sglang_hybrid {
namespace {

// The rows (tokens) of a block whose weights are not all 0, and their weights. The weights are copied once: the caller's
// memory may be shared with another process, which may change it at any time.
struct WeightedRows {
    alignas(64) float weights[max_group][block_tokens];  // of rows[i] at index i
    const char* rows[block_tokens];
    uint32_t count;

    // Read block `index` of the list, and prefetch its rows, which are used a block later.
    void read(const ValueSum& work, uint32_t index, uint32_t row_bytes) {
        uint32_t asked[block_tokens] = {};
        for (uint32_t head = 0; head < work.group; ++head) {
            memcpy(weights[head], work.weights + head * work.weight_stride + uint64_t{index} * block_tokens, sizeof weights[0]);
            for (uint32_t token = 0; token < block_tokens; ++token) {
                asked[token] |= weights[head][token] != 0.0f;  // true for NaN
            }
        }
        const char* const values = work.values + work.pages[index] * work.page_stride;
        count = 0;
        for (uint32_t token = 0; token < block_tokens; ++token) {
            if (!asked[token]) {
                continue;
            }
            rows[count] = values + token * row_bytes;
            LineStream(rows[count], row_bytes).request_all();
            if (count != token) {
                for (uint32_t head = 0; head < work.group; ++head) {
                    weights[head][count] = weights[head][token];
                }
            }
            ++count;
        }
    }
};

template <class Lanes, DType dtype, uint32_t dim>
class RunningSums {
  public:
    static void sum(const ValueSum& work) {
        RunningSums sums;  // uninitialised until start()
        sums.start(work.group);
        WeightedRows blocks[2];
        for (uint32_t index = 0; index <= work.count; ++index) {
            if (index < work.count) {
                blocks[index % 2].read(work, index, row_bytes);
            }
            if (index > 0) {
                sums.add(blocks[(index - 1) % 2]);
            }
        }
        sums.finish(work);
    }

  private:
    using Vector = typename Lanes::Vector;
    static constexpr uint32_t width = Lanes::width;
    static constexpr uint32_t pair = 2 * width;
    static constexpr uint32_t row_bytes = dim * bytes_of(dtype);
    static constexpr uint32_t columns_at_once = Lanes::output_pairs * pair;
    static_assert(dim % pair == 0);

    void start(uint32_t group) {
        parts_ = GroupParts<Lanes::output_heads>(group);
        for (uint32_t head = 0; head < group; ++head) {
            for (uint32_t i = 0; i < dim; i += width) {
                Lanes::store(&output_[head][i], Lanes::zero());
            }
        }
    }

    void add(const WeightedRows& block) {
        constexpr uint32_t whole = dim / columns_at_once * columns_at_once;
        for (uint32_t i = 0; i < whole; i += columns_at_once) {
            add_columns<Lanes::output_pairs>(block, i);
        }
        if constexpr (whole < dim) {
            add_columns<(dim - whole) / pair>(block, whole);
        }
    }

    template <uint32_t pairs>
    void add_columns(const WeightedRows& block, uint32_t column) {
        parts_.each([&](uint32_t head, auto heads) { add_columns_to<pairs, decltype(heads)::value>(block, column, head); });
    }

    template <uint32_t pairs, uint32_t heads>
    void add_columns_to(const WeightedRows& block, uint32_t column, uint32_t head) {
        float* const output = &output_[head][column];
        Vector sum[heads][2 * pairs];
#pragma GCC unroll 16
        for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 2 * pairs; ++i) {
                sum[h][i] = Lanes::load(output + h * dim + i * width);
            }
        }
#pragma GCC unroll 1
        for (uint32_t row = 0; row < block.count; ++row) {
            const char* const from = block.rows[row] + column * bytes_of(dtype);
            Vector value[2 * pairs];
#pragma GCC unroll 16
            for (uint32_t i = 0; i < pairs; ++i) {
                Lanes::template load_pair<dtype>(from + i * pair * bytes_of(dtype), value[2 * i], value[2 * i + 1]);
            }
#pragma GCC unroll 16
            for (uint32_t h = 0; h < heads; ++h) {
                const Vector weight = Lanes::broadcast(block.weights[head + h][row]);
#pragma GCC unroll 16
                for (uint32_t i = 0; i < 2 * pairs; ++i) {
                    sum[h][i] = Lanes::fma(value[i], weight, sum[h][i]);
                }
            }
        }
#pragma GCC unroll 16
        for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 2 * pairs; ++i) {
                Lanes::store(output + h * dim + i * width, sum[h][i]);
            }
        }
    }

    void finish(const ValueSum& work) const {
        for (uint32_t head = 0; head < work.group; ++head) {
            for (uint32_t i = 0; i < dim; i += pair) {
                Vector a = Lanes::load(&output_[head][i]);
                Vector b = Lanes::load(&output_[head][i + width]);
                if constexpr (Lanes::template splits<dtype>) {
                    Lanes::interleave(a, b);
                }
                Lanes::store(work.out + head * dim + i, a);
                Lanes::store(work.out + head * dim + i + width, b);
            }
        }
    }

    alignas(64) float output_[max_group][dim];  // in the order of load_pair
    GroupParts<Lanes::output_heads> parts_;
};

template <class Lanes, DType dtype>
inline SumKernel vector_sum_kernel_of(uint32_t head_dim) {
    switch (head_dim) {
        case 64: return RunningSums<Lanes, dtype, 64>::sum;
        case 96: return RunningSums<Lanes, dtype, 96>::sum;
        case 128: return RunningSums<Lanes, dtype, 128>::sum;
        case 256: return RunningSums<Lanes, dtype, 256>::sum;
        default: return nullptr;
    }
}

template <class Lanes>
inline SumKernel vector_sum_kernel(DType dtype, uint32_t head_dim) {
    switch (dtype) {
        case DType::bf16: return vector_sum_kernel_of<Lanes, DType::bf16>(head_dim);
        case DType::fp16: return vector_sum_kernel_of<Lanes, DType::fp16>(head_dim);
        case DType::fp32: return vector_sum_kernel_of<Lanes, DType::fp32>(head_dim);
        case DType::fp8_bf16:
        case DType::fp8_fp16:
        case DType::fp8_fp32: return vector_sum_kernel_of<Lanes, fp8>(head_dim);
    }
    return nullptr;
}

}  // namespace
}  // namespace sglang_hybrid
