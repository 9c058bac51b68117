// Block attention in fp32 vectors, for any instruction set that a Lanes type describes.
//
// Lanes has
//   Vector, width                     fp32 values in a register
//   logit_heads, logit_tokens         query heads x tokens whose dot products fit the registers
//   output_heads, output_pairs        heads x pairs of vectors of the output that fit the registers
//   zero broadcast load store add sub mul fma(a, b, c) = a * b + c, max
//   round(x)                          to the nearest integer
//   scaled_where_at_least(v, n, x, t) v * 2^n where x >= t, 0 elsewhere; the result is a normal number there
//   highest(v), sum(v)                over the lanes
//   store_sums(p, v[logit_tokens])    p[i] = sum of the lanes of v[i]
//   load_pair<dtype>(p, a, b)         2 * width values as fp32: the first half in a and the rest in b, or, where
//                                     splits<dtype> says so, those with even index in a and those with odd index in b.
//                                     FP8 is not split
//   interleave(a, b)                  undoes the latter
//   weight_tokens                     1, or `width` where there is fma_lane<i>(a, b, c) = a * b[i] + c
//   halves_of_fp8                     whether there is to_scaled_halves(p, count, to): FP8 as fp16 of 1 / fp8_scale of each
//                                     number, `count` a multiple of 64. It looks for NaN once, since there is hardly ever one
#pragma once

#include <stdint.h>

#include "attention/block_list.h"
#include "attention/fp8.h"
#include "attention/group_parts.h"
#include "attention/online_softmax.h"

namespace sglang_hybrid {
namespace {

// The state of attention from block to block, and the steps that update it, in fp32 for any dtype of the pool. Dimensions are
// in the order of load_pair in all arrays. Everything is uninitialised until start().
template <class Lanes, uint32_t dim>
class RunningAttention {
  public:
    using Vector = typename Lanes::Vector;
    static constexpr uint32_t width = Lanes::width;
    static constexpr uint32_t pair = 2 * width;
    static_assert(dim % pair == 0 && block_tokens % width == 0 && block_tokens % Lanes::logit_tokens == 0 &&
                  max_group % width == 0);

    template <DType dtype>
    static constexpr uint32_t row_bytes = dim * bytes_of(dtype);

    // True if each FP8 block is converted to fp16 once. The scale of these fp16 numbers is multiplied into the query and
    // into the output's factor.
    template <DType dtype>
    static constexpr bool converts = is_fp8(dtype) && Lanes::halves_of_fp8;

    template <DType dtype>
    static constexpr float pool_scale = converts<dtype> ? fp8_scale : 1.0f;

    template <DType dtype>
    static constexpr uint32_t block_lines = block_tokens * row_bytes<dtype> / cache_line;

    template <DType dtype>
    void start(const BlockAttention& work) {
        group_ = work.group;
        logit_parts_ = GroupParts<Lanes::logit_heads>(group_);
        output_parts_ = GroupParts<Lanes::output_heads>(group_);
        key_lines_ = lines_each(block_lines<dtype>, logit_parts_.count() * (block_tokens / tokens_at_once));
        constexpr uint32_t columns = (dim + output_columns - 1) / output_columns;
        value_lines_ = lines_each(block_lines<dtype>, output_parts_.count() * columns * (block_tokens / value_tokens));
        softmax_.start(group_);
        const Vector scale = Lanes::broadcast(work.scale * pool_scale<dtype>);
        const uint32_t query_bytes = query_bytes_of(work.dtype);
        for (uint32_t head = 0; head < group_; ++head) {
            const char* row = static_cast<const char*>(work.query) + head * dim * query_bytes;
            for (uint32_t i = 0; i < dim; i += pair) {
                Vector a, b;
                load_query<dtype>(query_dtype(work.dtype), row + i * query_bytes, a, b);
                Lanes::store(&query_[head][i], Lanes::mul(a, scale));
                Lanes::store(&query_[head][i + width], Lanes::mul(b, scale));
                Lanes::store(&output_[head][i], Lanes::zero());
                Lanes::store(&output_[head][i + width], Lanes::zero());
            }
        }
    }

    // Compute the block's logits from keys in fp32, tokens_at_once tokens at a time. These may include tokens behind the
    // block's last token. Prefetches `next_keys` meanwhile.
    template <DType dtype>
    void compute_logits(const Block& block, LineStream& next_keys) {
        alignas(64) float converted[dtype == DType::fp32 ? 1 : tokens_at_once * dim];
        for (uint32_t token = 0; token < block.tokens; token += tokens_at_once) {
            const char* rows = block.keys + token * row_bytes<dtype>;
            const float* keys = converted;
            if constexpr (dtype == DType::fp32) {
                keys = reinterpret_cast<const float*>(rows);
            } else if constexpr (converts<dtype>) {
                alignas(64) uint16_t halves[tokens_at_once * dim];
                Lanes::to_scaled_halves(rows, tokens_at_once * dim, halves);
                store_numbers<DType::fp16>(reinterpret_cast<const char*>(halves), converted);
            } else {
                store_numbers<dtype>(rows, converted);
            }
            logit_parts_.each([&](uint32_t head, auto heads) {
                next_keys.request(key_lines_);
                compute_logits_of<decltype(heads)::value>(keys, head, token);
            });
        }
        next_keys.request_all();
    }

    // The logits that compute_logits wrote. Logits of tokens behind the block's last token are undefined.
    const float (*logits() const)[block_tokens] { return softmax_.weights; }

    void logits_to_weights(uint32_t tokens) { softmax_.logits_to_weights(group_, tokens); }

    // Scale down the output and add the block's weighted values. Prefetches `next_values` meanwhile.
    template <DType dtype>
    void add_values(const Block& block, LineStream& next_values) {
        if constexpr (converts<dtype>) {
            alignas(64) uint16_t halves[block_tokens * dim];
            // convert an even number of tokens, so that `count` is a multiple of 64 numbers
            Lanes::to_scaled_halves(block.values, (block.tokens + 1) / 2 * 2 * dim, halves);
            Block converted = block;
            converted.values = reinterpret_cast<const char*>(halves);
            add_values<DType::fp16>(converted, next_values);
        } else {
            constexpr uint32_t whole = dim / output_columns * output_columns;
            for (uint32_t i = 0; i < whole; i += output_columns) {
                add_columns<dtype, Lanes::output_pairs>(block, i, next_values);
            }
            if constexpr (whole < dim) {
                add_columns<dtype, (dim - whole) / pair>(block, whole, next_values);
            }
            next_values.request_all();
        }
    }

    template <DType dtype>
    void finish(const BlockAttention& work) const {
        for (uint32_t head = 0; head < group_; ++head) {
            work.lse[head] = softmax_.lse(head);
            const Vector factor = Lanes::broadcast(softmax_.normalisation(head) * pool_scale<dtype>);
            float* out = work.out + head * dim;
            for (uint32_t i = 0; i < dim; i += pair) {
                Vector a = Lanes::mul(Lanes::load(&output_[head][i]), factor);
                Vector b = Lanes::mul(Lanes::load(&output_[head][i + width]), factor);
                if constexpr (Lanes::template splits<dtype>) {
                    Lanes::interleave(a, b);
                }
                Lanes::store(out + i, a);
                Lanes::store(out + i + width, b);
            }
        }
    }

  private:
    static constexpr uint32_t tokens_at_once = Lanes::logit_tokens;
    static constexpr uint32_t output_columns = Lanes::output_pairs * pair;
    static constexpr uint32_t value_tokens = 8;

    // Load numbers of the query in the order of the pool's load_pair.
    template <DType dtype>
    static void load_query(DType of_query, const char* from, Vector& a, Vector& b) {
        if constexpr (dtype != fp8) {
            Lanes::template load_pair<dtype>(from, a, b);
        } else if (of_query == DType::bf16) {
            load_in_order<DType::bf16>(from, a, b);
        } else if (of_query == DType::fp16) {
            load_in_order<DType::fp16>(from, a, b);
        } else {
            load_in_order<DType::fp32>(from, a, b);
        }
    }

    template <DType dtype>
    static void load_in_order(const char* from, Vector& a, Vector& b) {
        Lanes::template load_pair<dtype>(from, a, b);
        if constexpr (Lanes::template splits<dtype>) {
            Lanes::interleave(a, b);
        }
    }

    // Convert the numbers of tokens_at_once tokens to fp32.
    template <DType dtype>
    static void store_numbers(const char* from, float* to) {
        for (uint32_t i = 0; i < tokens_at_once * dim; i += pair) {
            Vector a, b;
            Lanes::template load_pair<dtype>(from + i * bytes_of(dtype), a, b);
            Lanes::store(to + i, a);
            Lanes::store(to + i + width, b);
        }
    }

    static uint32_t lines_each(uint32_t lines, uint32_t requests) { return (lines + requests - 1) / requests; }

    template <uint32_t heads>
    void compute_logits_of(const float* keys, uint32_t head, uint32_t token) {
        const float* queries = query_[head];
        Vector sum[heads][tokens_at_once];
#pragma GCC unroll 16
        for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 16
            for (uint32_t t = 0; t < tokens_at_once; ++t) {
                sum[h][t] = Lanes::zero();
            }
        }
#pragma GCC unroll 1
        for (uint32_t i = 0; i < dim; i += width) {
            Vector query[heads];
#pragma GCC unroll 16
            for (uint32_t h = 0; h < heads; ++h) {
                query[h] = Lanes::load(queries + h * dim + i);
            }
#pragma GCC unroll 16
            for (uint32_t t = 0; t < tokens_at_once; ++t) {
                const Vector key = Lanes::load(keys + t * dim + i);
#pragma GCC unroll 16
                for (uint32_t h = 0; h < heads; ++h) {
                    sum[h][t] = Lanes::fma(key, query[h], sum[h][t]);
                }
            }
        }
#pragma GCC unroll 16
        for (uint32_t h = 0; h < heads; ++h) {
            Lanes::store_sums(&softmax_.weights[head + h][token], sum[h]);
        }
    }

    template <DType dtype, uint32_t pairs>
    void add_columns(const Block& block, uint32_t column, LineStream& next_values) {
        output_parts_.each([&](uint32_t head, auto heads) {
            add_columns_to<dtype, pairs, decltype(heads)::value>(block, column, head, next_values);
        });
    }

    // Weights behind the block's last token are 0, but the values there may be NaN, so they must not be used at all.
    template <DType dtype, uint32_t pairs, uint32_t heads>
    void add_columns_to(const Block& block, uint32_t column, uint32_t head, LineStream& next_values) {
        constexpr uint32_t value_bytes = row_bytes<dtype> / dim;
        float* const output = &output_[head][column];
        const float* weights = softmax_.weights[head];

        Vector sum[heads][2 * pairs];
#pragma GCC unroll 16
        for (uint32_t h = 0; h < heads; ++h) {
            const Vector factor = Lanes::broadcast(softmax_.rescale[head + h]);
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 2 * pairs; ++i) {
                sum[h][i] = Lanes::mul(Lanes::load(output + h * dim + i * width), factor);
            }
        }
        const char* row = block.values + column * value_bytes;
        const auto add_token = [&](auto weighted_by) {
            Vector value[2 * pairs];
#pragma GCC unroll 16
            for (uint32_t i = 0; i < pairs; ++i) {
                Lanes::template load_pair<dtype>(row + i * pair * value_bytes, value[2 * i], value[2 * i + 1]);
            }
#pragma GCC unroll 16
            for (uint32_t h = 0; h < heads; ++h) {
                const auto add_weighted = weighted_by(h);
#pragma GCC unroll 16
                for (uint32_t i = 0; i < 2 * pairs; ++i) {
                    sum[h][i] = add_weighted(value[i], sum[h][i]);
                }
            }
            row += row_bytes<dtype>;
        };
        const auto by_one_weight = [&](uint32_t h) {
            const Vector weight = Lanes::broadcast(weights[h * block_tokens]);
            return [weight](Vector value, Vector total) { return Lanes::fma(value, weight, total); };
        };
        uint32_t left = block.tokens;
        for (; left >= value_tokens; left -= value_tokens) {
            next_values.request(value_lines_);
            if constexpr (Lanes::weight_tokens == 1) {
#pragma GCC unroll 1
                for (uint32_t t = 0; t < value_tokens; ++t, ++weights) {
                    add_token(by_one_weight);
                }
            } else {
#pragma GCC unroll 1
                for (uint32_t t = 0; t < value_tokens; t += Lanes::weight_tokens, weights += Lanes::weight_tokens) {
                    Vector weight[heads];
#pragma GCC unroll 16
                    for (uint32_t h = 0; h < heads; ++h) {
                        weight[h] = Lanes::load(weights + h * block_tokens);
                    }
                    each_weight<0>([&](auto lane) {
                        add_token([&](uint32_t h) {
                            return [w = weight[h]](Vector value, Vector total) {
                                return Lanes::template fma_lane<decltype(lane)::value>(value, w, total);
                            };
                        });
                    });
                }
            }
        }
        for (; left > 0; --left, ++weights) {
            add_token(by_one_weight);
        }
#pragma GCC unroll 16
        for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 2 * pairs; ++i) {
                Lanes::store(output + h * dim + i * width, sum[h][i]);
            }
        }
    }

    template <uint32_t first, class Body>
    static void each_weight(Body body) {
        body(Constant<first>());
        if constexpr (first + 1 < Lanes::weight_tokens) {
            each_weight<first + 1>(body);
        }
    }

    alignas(64) float query_[max_group][dim];  // the query times the scale of the logits
    alignas(64) float output_[max_group][dim];
    OnlineSoftmax<Lanes> softmax_;
    uint32_t group_;
    GroupParts<Lanes::logit_heads> logit_parts_;
    GroupParts<Lanes::output_heads> output_parts_;
    uint32_t key_lines_;    // lines to prefetch with each part of the logits
    uint32_t value_lines_;  // lines to prefetch with each `value_tokens` of a part of the output
};

template <class Lanes, DType dtype, uint32_t dim>
inline void attend_in_vectors(const BlockAttention& work) {
    using State = RunningAttention<Lanes, dim>;
    constexpr uint32_t row_bytes = State::template row_bytes<dtype>;
    if (work.count == 0) {
        return answer_empty(work);
    }
    Block block = block_of(work, 0);
    LineStream(block.keys, block.tokens * row_bytes).request_all();
    LineStream(block.values, block.tokens * row_bytes).request_all();

    State state;
    state.template start<dtype>(work);
    for (uint32_t index = 0; index < work.count; ++index) {
        const Block next = block_ahead(work, index + 1);
        find_pages(block_ahead(work, index + 2), row_bytes);
        LineStream next_keys(next.keys, next.tokens * row_bytes);
        LineStream next_values(next.values, next.tokens * row_bytes);
        state.template compute_logits<dtype>(block, next_keys);
        state.logits_to_weights(block.tokens);
        state.template add_values<dtype>(block, next_values);
        block = next;
    }
    state.template finish<dtype>(work);
}

template <class Lanes, DType dtype>
inline Kernel vector_kernel_of(uint32_t head_dim) {
    switch (head_dim) {
        case 64: return attend_in_vectors<Lanes, dtype, 64>;
        case 96: return attend_in_vectors<Lanes, dtype, 96>;
        case 128: return attend_in_vectors<Lanes, dtype, 128>;
        case 256: return attend_in_vectors<Lanes, dtype, 256>;
        default: return nullptr;
    }
}

template <class Lanes>
inline Kernel vector_kernel(DType dtype, uint32_t head_dim) {
    switch (dtype) {
        case DType::bf16: return vector_kernel_of<Lanes, DType::bf16>(head_dim);
        case DType::fp16: return vector_kernel_of<Lanes, DType::fp16>(head_dim);
        case DType::fp32: return vector_kernel_of<Lanes, DType::fp32>(head_dim);
        case DType::fp8_bf16:
        case DType::fp8_fp16:
        case DType::fp8_fp32: return vector_kernel_of<Lanes, fp8>(head_dim);
    }
    return nullptr;
}

}  // namespace
}  // namespace sglang_hybrid
