// Block attention in fp32 vectors for every dtype, on any aarch64.
//
// Tiles are compiled for each dtype and number of heads. The head dimension is only the length of the tiles' loops and the
// stride between rows, so all head dimensions share one kernel.
//
// A block of FP8 is converted to fp16 in the first-level cache, 16 numbers at a time, and computed with tiles of fp16.
// Conversion inside the tiles, four numbers at a time, would take longer than the products.
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "attention/block_list.h"
#include "attention/group_parts.h"
#include "attention/neon_fp8.h"
#include "attention/neon_lanes.h"
#include "attention/neon_logits.h"
#include "attention/neon_output.h"
#include "attention/online_softmax.h"
#include "attention/variants.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t tile_heads = 8;  // most heads of a tile: for groups up to 8 each key and value is converted only once

template <DType dtype>
class NeonKernel {
  public:
    static void attend(const BlockAttention& work) {
        if (work.count == 0) {
            return answer_empty(work);
        }
        State state;
        Block block = block_of(work, 0);
        const uint32_t row_bytes = work.head_dim * bytes_of(dtype);
        LineStream(block.keys, block.tokens * row_bytes).request_all();
        LineStream(block.values, block.tokens * row_bytes).request_all();
        state.start(work);
        for (uint32_t index = 0; index < work.count; ++index) {
            const Block next = block_ahead(work, index + 1);
            find_pages(block_ahead(work, index + 2), row_bytes);
            TwoLevelLines with_logits(next.keys, block.values, block_tokens * row_bytes);
            TwoLevelLines with_values(next.values, next.keys, block_tokens * row_bytes);
            state.compute_logits(block, with_logits);
            state.softmax.logits_to_weights(work.group, block.tokens);
            state.add_values(block, with_values);
            block = next;
        }
        state.finish(work);
    }

  private:
    // Uninitialised until start(). Query and output are in the order of the tiles: one part of the group after another,
    // and within a part in the order that a tile needs.
    struct State {
        static constexpr DType tile_dtype = is_fp8(dtype) ? DType::fp16 : dtype;
        static constexpr float pool_scale = is_fp8(dtype) ? fp8_scale : 1.0f;  // factor from numbers in tiles to values

        alignas(64) float query[max_group * max_head_dim];  // the query times the scale of the logits
        alignas(64) float output[max_group * max_head_dim];
        alignas(64) char padded_values[block_tokens * max_head_dim * bytes_of(tile_dtype)];  // or converted values
        alignas(64) uint16_t converted_keys[is_fp8(dtype) ? block_tokens * max_head_dim : 1];
        OnlineSoftmax<NeonLanes> softmax;
        GroupParts<tile_heads> parts;
        uint32_t dim;
        uint32_t row_bytes;  // of the rows that tiles are loaded from

        void start(const BlockAttention& work) {
            parts = GroupParts<tile_heads>(work.group);
            dim = work.head_dim;
            row_bytes = dim * bytes_of(tile_dtype);
            softmax.start(work.group);
            memset(output, 0, work.group * dim * sizeof *output);
            parts.each([&](uint32_t first, auto heads) {
                float* to = query + first * dim;
                for (uint32_t i = 0; i < dim; i += vector_width) {
                    for (uint32_t h = 0; h < heads.value; ++h, to += vector_width) {
                        vst1q_f32(to, vmulq_n_f32(query_four(work, (first + h) * dim + i), work.scale * pool_scale));
                    }
                }
            });
        }

        // Round up to a multiple of weight_tokens, the tokens whose weights fill a register.
        static uint32_t rounded_up(uint32_t tokens) { return (tokens + weight_tokens - 1) / weight_tokens * weight_tokens; }

        static float32x4_t query_four(const BlockAttention& work, uint32_t index) {
            const char* const from = static_cast<const char*>(work.query) + index * query_bytes_of(work.dtype);
            if constexpr (dtype != fp8) {
                return load_four<dtype>(from);
            } else if (work.dtype == DType::fp8_bf16) {
                return load_four<DType::bf16>(from);
            } else if (work.dtype == DType::fp8_fp16) {
                return load_four<DType::fp16>(from);
            } else {
                return load_four<DType::fp32>(from);
            }
        }

        // A tile may include tokens behind the block's last token.
        void compute_logits(const Block& block, TwoLevelLines& ahead) {
            const char* keys = block.keys;
            if constexpr (is_fp8(dtype)) {
                to_scaled_halves(block.keys, rounded_up(block.tokens) * dim, converted_keys);
                keys = reinterpret_cast<const char*>(converted_keys);
            }
            parts.each([&](uint32_t first, auto heads) {
                constexpr uint32_t tokens = logit_tokens<heads.value>;
                for (uint32_t token = 0; token < block.tokens; token += tokens) {
                    compute_logits_of<tile_dtype, heads.value>(query + first * dim, keys + token * row_bytes, row_bytes,
                                                               &softmax.weights[first][token], ahead);
                }
            });
            ahead.request_all();
        }

        void add_values(const Block& block, TwoLevelLines& ahead) {
            const uint32_t tokens = rounded_up(block.tokens);
            const char* values = padded_values;
            if constexpr (is_fp8(dtype)) {
                to_scaled_halves(block.values, block.tokens * dim, reinterpret_cast<uint16_t*>(padded_values));
                memset(padded_values + block.tokens * row_bytes, 0, (tokens - block.tokens) * row_bytes);
            } else {
                values = values_or_zero(block, row_bytes, padded_values);
            }
            parts.each([&](uint32_t first, auto heads) {
                constexpr uint32_t tile_dims = output_vectors<heads.value> * vector_width;
                for (uint32_t i = 0; i < dim; i += tile_dims) {
                    add_values_to<tile_dtype, heads.value>(output + first * dim + i * heads.value, &softmax.rescale[first],
                                                           softmax.weights[first], tokens, values + i * bytes_of(tile_dtype),
                                                           row_bytes, ahead);
                }
            });
            ahead.request_all();
        }

        void finish(const BlockAttention& work) const {
            float factor[max_group];
            for (uint32_t head = 0; head < work.group; ++head) {
                work.lse[head] = softmax.lse(head);
                factor[head] = softmax.normalisation(head) * pool_scale;
            }
            parts.each([&](uint32_t first, auto heads) {
                constexpr uint32_t tile_dims = output_vectors<heads.value> * vector_width;
                const float* from = output + first * dim;
                for (uint32_t tile = 0; tile < dim; tile += tile_dims) {
                    for (uint32_t head = first; head < first + heads.value; ++head) {
                        for (uint32_t i = 0; i < tile_dims; i += vector_width, from += vector_width) {
                            vst1q_f32(work.out + head * dim + tile + i, vmulq_n_f32(vld1q_f32(from), factor[head]));
                        }
                    }
                }
            });
        }
    };
};

}  // namespace

Kernel neon_kernel(DType dtype, uint32_t head_dim) {
    if (!is_head_dim(head_dim)) {
        return nullptr;
    }
    switch (dtype) {
        case DType::bf16: return NeonKernel<DType::bf16>::attend;
        case DType::fp16: return NeonKernel<DType::fp16>::attend;
        case DType::fp32: return NeonKernel<DType::fp32>::attend;
        case DType::fp8_bf16:
        case DType::fp8_fp16:
        case DType::fp8_fp32: return NeonKernel<fp8>::attend;
    }
    return nullptr;
}

}  // namespace sglang_hybrid
