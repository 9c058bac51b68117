// Block attention for bf16 with BFMMLA, which multiplies a 2 x 4 matrix by a 4 x 2 matrix into a 2 x 2 matrix of fp32 in one
// register. In both operands, four consecutive numbers of a register lie along the dimension that is summed over.
//
// Logits: two tokens by two heads, summed over dimensions, which leaves no sums across lanes. Output: two heads by two
// dimensions, summed over tokens; values are transposed in registers, four tokens by eight dimensions at a time.
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "attention/block_list.h"
#include "attention/group_parts.h"
#include "attention/neon_lanes.h"
#include "attention/online_softmax.h"
#include "attention/variants.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t max_head_pairs = max_group / 2;
constexpr uint32_t head_pairs_at_once = 4;  // 16 sums in registers, in either product
constexpr uint32_t step = 8;                // dimensions in a register
constexpr uint32_t logit_tokens = 8;        // tokens whose logits are summed at once
constexpr uint32_t depth = 4;               // numbers that one product sums over

inline uint16x8_t load_row(const char* from) { return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from))); }

inline uint16x8_t zip_low_32(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_u16_u32(vzip1q_u32(vreinterpretq_u32_u16(a), vreinterpretq_u32_u16(b)));
}

inline uint16x8_t zip_high_32(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_u16_u32(vzip2q_u32(vreinterpretq_u32_u16(a), vreinterpretq_u32_u16(b)));
}

inline bfloat16x8_t low_halves(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_bf16_u64(vzip1q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}

inline bfloat16x8_t high_halves(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_bf16_u64(vzip2q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}

inline float32x4_t low_halves(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

inline float32x4_t high_halves(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

template <uint32_t dim>
class NeonBf16Kernel {
  public:
    static void attend(const BlockAttention& work) {
        if (work.count == 0) {
            return answer_empty(work);
        }
        Block block = block_of(work, 0);
        LineStream(block.keys, block.tokens * row_bytes).request_all();
        LineStream(block.values, block.tokens * row_bytes).request_all();

        State state;
        state.start(work);
        for (uint32_t index = 0; index < work.count; ++index) {
            const Block next = block_ahead(work, index + 1);
            find_pages(block_ahead(work, index + 2), row_bytes);
            LineStream next_keys(next.keys, next.tokens * row_bytes);
            LineStream next_values(next.values, next.tokens * row_bytes);
            state.compute_logits(block, next_keys);
            state.softmax.logits_to_weights(work.group, block.tokens);
            state.round_weights();
            state.add_values(block, next_values);
            block = next;
        }
        state.finish(work);
    }

  private:
    static constexpr uint32_t row_bytes = dim * 2;
    static constexpr uint32_t block_lines = block_tokens * row_bytes / cache_line;

    // Heads are stored in pairs. The last head of an odd group is paired with a head of zeros, whose results are dropped.
    // Uninitialised until start().
    struct State {
        alignas(64) uint16_t query[dim / depth][max_head_pairs][2 * depth];  // four dimensions of both heads
        alignas(64) bfloat16_t weights[block_tokens / depth][max_head_pairs][2 * depth];  // four tokens of both heads
        alignas(64) float output[max_head_pairs][dim / 2][4];  // two dimensions of one head, then of the other
        alignas(64) char padded_values[block_tokens * row_bytes];
        OnlineSoftmax<NeonLanes> softmax;
        uint32_t head_pairs;
        GroupParts<head_pairs_at_once> parts;  // parts of the head pairs
        float scale;

        void start(const BlockAttention& work) {
            head_pairs = (work.group + 1) / 2;
            parts = GroupParts<head_pairs_at_once>(head_pairs);
            scale = work.scale;
            softmax.start(work.group);
            for (uint32_t head = 0; head < 2 * head_pairs; ++head) {
                const char* row = static_cast<const char*>(work.query) + head * row_bytes;
                for (uint32_t i = 0; i < dim / depth; ++i) {
                    uint16_t* four = query[i][head / 2] + head % 2 * depth;
                    if (head < work.group) {
                        memcpy(four, row + i * depth * 2, depth * 2);
                    } else {
                        memset(four, 0, depth * 2);
                    }
                }
            }
            memset(output, 0, head_pairs * sizeof output[0]);
        }

        void compute_logits(const Block& block, LineStream& next_keys) {
            const uint32_t requests = parts.count() * (block_tokens / logit_tokens) * (dim / step);
            const uint32_t lines = (block_lines + requests - 1) / requests;
            for (uint32_t token = 0; token < block.tokens; token += logit_tokens) {
                const char* keys = block.keys + token * row_bytes;
                parts.each([&](uint32_t first, auto pairs) {
                    compute_logits_of<decltype(pairs)::value>(keys, first, token, next_keys, lines);
                });
            }
            next_keys.request_all();
        }

        template <uint32_t pairs>
        void compute_logits_of(const char* keys, uint32_t first, uint32_t token, LineStream& next_keys, uint32_t lines) {
            constexpr uint32_t token_pairs = logit_tokens / 2;
            float32x4_t sum[pairs][token_pairs];
#pragma GCC unroll 16
            for (uint32_t p = 0; p < pairs; ++p) {
#pragma GCC unroll 16
                for (uint32_t t = 0; t < token_pairs; ++t) {
                    sum[p][t] = vdupq_n_f32(0.0f);
                }
            }
            const uint16_t* operands = query[0][first];
#pragma GCC unroll 1
            for (uint32_t i = 0; i < dim; i += step, operands += 2 * sizeof query[0] / sizeof *operands) {
                next_keys.request(lines);
                bfloat16x8_t low[token_pairs], high[token_pairs];
#pragma GCC unroll 16
                for (uint32_t t = 0; t < token_pairs; ++t) {
                    const uint16x8_t a = load_row(keys + 2 * t * row_bytes + i * 2);
                    const uint16x8_t b = load_row(keys + (2 * t + 1) * row_bytes + i * 2);
                    low[t] = low_halves(a, b);
                    high[t] = high_halves(a, b);
                }
#pragma GCC unroll 16
                for (uint32_t p = 0; p < pairs; ++p) {
                    const uint16_t* operand = operands + p * 2 * depth;
                    const bfloat16x8_t query_low = vreinterpretq_bf16_u16(vld1q_u16(operand));
                    const bfloat16x8_t query_high =
                        vreinterpretq_bf16_u16(vld1q_u16(operand + sizeof query[0] / sizeof *operand));
#pragma GCC unroll 16
                    for (uint32_t t = 0; t < token_pairs; ++t) {
                        sum[p][t] = vbfmmlaq_f32(sum[p][t], low[t], query_low);
                    }
#pragma GCC unroll 16
                    for (uint32_t t = 0; t < token_pairs; ++t) {
                        sum[p][t] = vbfmmlaq_f32(sum[p][t], high[t], query_high);
                    }
                }
            }
#pragma GCC unroll 16
            for (uint32_t p = 0; p < pairs; ++p) {
                float* one = &softmax.weights[2 * (first + p)][token];
                float* other = &softmax.weights[2 * (first + p) + 1][token];
#pragma GCC unroll 16
                for (uint32_t t = 0; t < token_pairs; t += 2) {
                    vst1q_f32(one + 2 * t, vmulq_n_f32(vuzp1q_f32(sum[p][t], sum[p][t + 1]), scale));
                    vst1q_f32(other + 2 * t, vmulq_n_f32(vuzp2q_f32(sum[p][t], sum[p][t + 1]), scale));
                }
            }
        }

        void round_weights() {
            for (uint32_t p = 0; p < head_pairs; ++p) {
                for (uint32_t token = 0; token < block_tokens; token += depth) {
                    const bfloat16x8_t one = vcvtq_low_bf16_f32(vld1q_f32(&softmax.weights[2 * p][token]));
                    const float32x4_t other = vld1q_f32(&softmax.weights[2 * p + 1][token]);
                    vst1q_bf16(weights[token / depth][p], vcvtq_high_bf16_f32(one, other));
                }
            }
        }

        void add_values(const Block& block, LineStream& next_values) {
            const char* values = values_or_zero(block, row_bytes, padded_values);
            const uint32_t requests = parts.count() * (dim / step);
            const uint32_t lines = (block_lines + requests - 1) / requests;
            for (uint32_t i = 0; i < dim; i += step) {
                parts.each([&](uint32_t first, auto pairs) {
                    next_values.request(lines);
                    add_columns<decltype(pairs)::value>(values, i, first);
                });
            }
            next_values.request_all();
        }

        template <uint32_t pairs>
        void add_columns(const char* values, uint32_t column, uint32_t first) {
            constexpr uint32_t sums = step / 2;
            float32x4_t sum[pairs][sums];
#pragma GCC unroll 16
            for (uint32_t p = 0; p < pairs; ++p) {
                const float* factors = &softmax.rescale[2 * (first + p)];
                const float32x4_t factor = vcombine_f32(vld1_dup_f32(factors), vld1_dup_f32(factors + 1));
#pragma GCC unroll 16
                for (uint32_t i = 0; i < sums; ++i) {
                    sum[p][i] = vmulq_f32(vld1q_f32(output[first + p][column / 2 + i]), factor);
                }
            }
            const char* rows = values + column * 2;
            const bfloat16_t* operands = weights[0][first];
#pragma GCC unroll 1
            for (uint32_t token = 0; token < block_tokens; token += depth) {
                const uint16x8_t a = load_row(rows), b = load_row(rows + row_bytes);
                const uint16x8_t c = load_row(rows + 2 * row_bytes), d = load_row(rows + 3 * row_bytes);
                const uint16x8_t ab_low = vzip1q_u16(a, b), ab_high = vzip2q_u16(a, b);
                const uint16x8_t cd_low = vzip1q_u16(c, d), cd_high = vzip2q_u16(c, d);
                const bfloat16x8_t value[sums] = {
                    vreinterpretq_bf16_u16(zip_low_32(ab_low, cd_low)),
                    vreinterpretq_bf16_u16(zip_high_32(ab_low, cd_low)),
                    vreinterpretq_bf16_u16(zip_low_32(ab_high, cd_high)),
                    vreinterpretq_bf16_u16(zip_high_32(ab_high, cd_high)),
                };
#pragma GCC unroll 16
                for (uint32_t p = 0; p < pairs; ++p) {
                    const bfloat16x8_t weight = vld1q_bf16(operands + p * 2 * depth);
#pragma GCC unroll 16
                    for (uint32_t i = 0; i < sums; ++i) {
                        sum[p][i] = vbfmmlaq_f32(sum[p][i], weight, value[i]);
                    }
                }
                rows += depth * row_bytes;
                operands += sizeof weights[0] / sizeof *operands;
            }
#pragma GCC unroll 16
            for (uint32_t p = 0; p < pairs; ++p) {
#pragma GCC unroll 16
                for (uint32_t i = 0; i < sums; ++i) {
                    vst1q_f32(output[first + p][column / 2 + i], sum[p][i]);
                }
            }
        }

        void finish(const BlockAttention& work) const {
            for (uint32_t head = 0; head < work.group; ++head) {
                work.lse[head] = softmax.lse(head);
                const float factor = softmax.normalisation(head);
                float* out = work.out + head * dim;
                for (uint32_t i = 0; i < dim; i += 4) {
                    const float32x4_t a = vld1q_f32(output[head / 2][i / 2]);
                    const float32x4_t b = vld1q_f32(output[head / 2][i / 2 + 1]);
                    const float32x4_t four = head % 2 == 0 ? low_halves(a, b) : high_halves(a, b);
                    vst1q_f32(out + i, vmulq_n_f32(four, factor));
                }
            }
        }
    };
};

}  // namespace

Kernel neon_bf16_kernel(DType dtype, uint32_t head_dim) {
    if (dtype != DType::bf16) {
        return nullptr;
    }
    switch (head_dim) {
        case 64: return NeonBf16Kernel<64>::attend;
        case 96: return NeonBf16Kernel<96>::attend;
        case 128: return NeonBf16Kernel<128>::attend;
        case 256: return NeonBf16Kernel<256>::attend;
        default: return nullptr;
    }
}

}  // namespace sglang_hybrid
