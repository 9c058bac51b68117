// HostLoops for any Lanes (see vector_kernel.h). One file per instruction set includes this header, so the header uses nothing
// of the standard library that the linker could share between these files.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention/exponential.h"
#include "host/loops.h"

namespace sglang_hybrid {
namespace {

template <class Lanes>
struct VectorLoops {
    using Vector = typename Lanes::Vector;
    static constexpr uint32_t width = Lanes::width;
    static constexpr float levels = 16;
    // exp(reach) and exp(-reach) are normal floats
    static constexpr float reach = 126 * 0.69314718f;

    template <DType dtype>
    static void convert(const char* from, uint32_t count, float* to) {
        for (uint32_t i = 0; i < count; i += 2 * width) {
            Vector a, b;
            Lanes::template load_pair<dtype>(from + i * bytes_of(dtype), a, b);
            if constexpr (Lanes::template splits<dtype>) {
                Lanes::interleave(a, b);
            }
            Lanes::store(to + i, a);
            Lanes::store(to + i + width, b);
        }
    }

    // Exact, since `value` was converted from this dtype.
    template <DType dtype>
    static void store_exactly(float value, char* to) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        uint16_t narrow = static_cast<uint16_t>(bits >> 16);  // bf16
        if constexpr (dtype == DType::fp32) {
            memcpy(to, &value, sizeof value);
            return;
        } else if constexpr (is_fp8(dtype)) {
            const float magnitude = fabsf(value);
            uint32_t byte = 0x7f;  // NaN
            if (magnitude < 0x1p-6f) {
                byte = static_cast<uint32_t>(magnitude * 0x1p9f);  // a denormal: the number of its steps of 2^-9
            } else if (magnitude == magnitude) {
                byte = (bits >> 20 & 0x7ff) - (120u << 3);
            }
            *to = static_cast<char>(byte | (bits >> 24 & 0x80));
            return;
        } else if constexpr (dtype == DType::fp16) {
            const uint16_t sign = narrow & 0x8000;
            const float magnitude = fabsf(value);
            if (!(magnitude < 65536.0f)) {  // infinity and NaN
                narrow = sign | (magnitude == magnitude ? 0x7c00 : 0x7e00);
            } else {
                const float moved = magnitude * 0x1p-112f;  // the exponent's bias from 127 to 15
                memcpy(&bits, &moved, sizeof bits);
                narrow = sign | static_cast<uint16_t>(bits >> 13);
            }
        }
        memcpy(to, &narrow, sizeof narrow);
    }

    template <DType dtype>
    static void digest(const char* keys, uint32_t filled, uint32_t dim, char* to) {
        alignas(64) float row[max_head_dim], high[max_head_dim], low[max_head_dim], poison[max_head_dim];
        const uint32_t row_bytes = dim * bytes_of(dtype);
        convert<dtype>(keys, dim, high);
        memcpy(low, high, dim * sizeof(float));
        for (uint32_t i = 0; i < dim; i += width) {
            Lanes::store(poison + i, Lanes::mul(Lanes::load(high + i), Lanes::zero()));
        }
        for (uint32_t token = 1; token < filled; ++token) {
            convert<dtype>(keys + token * row_bytes, dim, row);
            for (uint32_t i = 0; i < dim; i += width) {
                const Vector x = Lanes::load(row + i);
                Lanes::store(high + i, Lanes::max(x, Lanes::load(high + i)));
                const Vector opposite =
                    Lanes::max(Lanes::sub(Lanes::zero(), x), Lanes::sub(Lanes::zero(), Lanes::load(low + i)));
                Lanes::store(low + i, Lanes::sub(Lanes::zero(), opposite));
                // 0, or NaN once a key is not finite: the maxima would drop NaN
                Lanes::store(poison + i, Lanes::fma(x, Lanes::zero(), Lanes::load(poison + i)));
            }
        }
        for (uint32_t i = 0; i < dim; ++i) {
            store_exactly<dtype>(high[i] + poison[i], to + i * bytes_of(dtype));
            store_exactly<dtype>(low[i] + poison[i], to + row_bytes + i * bytes_of(dtype));
        }
    }

    template <DType dtype>
    static void codes(const char* keys, const char* digest, const uint32_t* position, uint32_t channels, uint32_t dim,
                      uint8_t* to) {
        alignas(64) float row[max_head_dim], high[max_head_dim], low[max_head_dim];
        float bottom[max_head_dim], step[max_head_dim];
        const uint32_t row_bytes = dim * bytes_of(dtype);
        convert<dtype>(digest, dim, high);
        convert<dtype>(digest + row_bytes, dim, low);
        for (uint32_t c = 0; c < channels; ++c) {
            bottom[c] = low[position[c]];
            step[c] = (high[position[c]] - bottom[c]) / levels;
        }
        for (uint32_t token = 0; token < block_tokens; ++token, to += channels / 2) {
            const float* key = reinterpret_cast<const float*>(keys + token * row_bytes);
            if constexpr (dtype != DType::fp32) {
                convert<dtype>(keys + token * row_bytes, dim, row);
                key = row;
            }
            int32_t code[max_head_dim];
            float place[max_head_dim];
            for (uint32_t c = 0; c < channels; ++c) {
                place[c] = key[position[c]];
            }
            for (uint32_t c = 0; c < channels; ++c) {
                float value = (place[c] - bottom[c]) / step[c];
                value = value > 0.0f ? value : 0.0f;  // also for NaN, from a channel without a range
                value = value < levels - 1 ? value : levels - 1;
                code[c] = static_cast<int32_t>(value);
            }
            for (uint32_t i = 0; i < channels / 2; ++i) {
                to[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
            }
        }
    }

    static float dot(const float* a, const float* b, uint32_t count) {
        Vector sum = Lanes::zero(), other = Lanes::zero();
        for (uint32_t i = 0; i < count; i += 2 * width) {  // count is a multiple of 32
            sum = Lanes::fma(Lanes::load(a + i), Lanes::load(b + i), sum);
            other = Lanes::fma(Lanes::load(a + i + width), Lanes::load(b + i + width), other);
        }
        return Lanes::sum(Lanes::add(sum, other));
    }

    template <DType dtype>
    static void estimate(const EstimateQuery& q, const char* digest, const uint8_t* codes, float* out) {
        alignas(64) float high[max_head_dim], low[max_head_dim];
        convert<dtype>(digest, q.head_dim, high);
        convert<dtype>(digest + q.head_dim * bytes_of(dtype), q.head_dim, low);
        if (codes == nullptr) {
            for (uint32_t g = 0; g < q.group; ++g) {
                const uint32_t first = g * q.head_dim;
                out[g] = q.scale * (dot(q.query + first, high, q.head_dim) + dot(q.lower + first, low, q.head_dim));
            }
            return;
        }
        alignas(64) float step[max_head_dim];
        for (uint32_t c = 0; c < q.channels; ++c) {
            step[c] = (high[q.position[c]] - low[q.position[c]]) / levels;
        }
        for (uint32_t i = 0; i < q.head_dim; i += width) {  // the middle of each range replaces its maximum
            const Vector sum = Lanes::add(Lanes::load(high + i), Lanes::load(low + i));
            Lanes::store(high + i, Lanes::mul(sum, Lanes::broadcast(0.5f)));
        }
        alignas(64) float places[block_tokens * max_head_dim];
        unpack(codes, q.channels, places);
        for (uint32_t g = 0; g < q.group; ++g) {
            alignas(64) float weights[max_head_dim], tokens[block_tokens];
            Vector total = Lanes::zero();
            for (uint32_t c = 0; c < q.channels; c += width) {
                const Vector weight = Lanes::mul(Lanes::load(step + c), Lanes::load(q.asked + g * q.channels + c));
                Lanes::store(weights + c, weight);
                total = Lanes::add(total, weight);
            }
            token_logits(weights, places, q.channels, tokens);
            // a code of c stands for (c - 7.5) steps from the middle of the range
            float mass = log_sum_exp(tokens) - (levels - 1) / 2 * Lanes::sum(total);
            mass = mass < -reach ? -reach : mass > reach ? reach : mass;
            out[g] = mass + q.scale * dot(q.query + g * q.head_dim, high, q.head_dim);
        }
    }

    // codes [32][channels / 2] -> [32][channels], even channels first
    static void unpack(const uint8_t* codes, uint32_t channels, float* to) {
        const uint32_t half = channels / 2;
        for (uint32_t token = 0; token < block_tokens; ++token, codes += half, to += channels) {
            for (uint32_t i = 0; i < half; ++i) {
                to[i] = static_cast<float>(codes[i] & 15);
            }
            for (uint32_t i = 0; i < half; ++i) {
                to[half + i] = static_cast<float>(codes[i] >> 4);
            }
        }
    }

    static void token_logits(const float* weights, const float* places, uint32_t channels, float* tokens) {
        constexpr uint32_t at_once = Lanes::logit_tokens;
        for (uint32_t token = 0; token < block_tokens; token += at_once) {
            Vector sums[at_once];
            for (uint32_t t = 0; t < at_once; ++t) {
                sums[t] = Lanes::zero();
            }
            for (uint32_t c = 0; c < channels; c += width) {
                const Vector weight = Lanes::load(weights + c);
#pragma GCC unroll 8
                for (uint32_t t = 0; t < at_once; ++t) {
                    sums[t] = Lanes::fma(weight, Lanes::load(places + (token + t) * channels + c), sums[t]);
                }
            }
            Lanes::store_sums(tokens + token, sums);
        }
    }

    static float log_sum_exp(const float* tokens) {
        Vector most = Lanes::load(tokens);
        for (uint32_t t = width; t < block_tokens; t += width) {
            most = Lanes::max(most, Lanes::load(tokens + t));
        }
        const float highest = Lanes::highest(most);
        Vector sum = Lanes::zero();
        for (uint32_t t = 0; t < block_tokens; t += width) {
            sum = Lanes::add(sum, exponential<Lanes>(Lanes::sub(Lanes::load(tokens + t), Lanes::broadcast(highest))));
        }
        return highest + logf(Lanes::sum(sum));
    }

    // -- by dtype --------------------------------------------------------------------------------------------------------

    static void any_digest(DType dtype, const char* keys, uint32_t filled, uint32_t dim, char* to) {
        switch (dtype) {
            case DType::bf16: return digest<DType::bf16>(keys, filled, dim, to);
            case DType::fp16: return digest<DType::fp16>(keys, filled, dim, to);
            case DType::fp32: return digest<DType::fp32>(keys, filled, dim, to);
            case DType::fp8_bf16:
            case DType::fp8_fp16:
            case DType::fp8_fp32: return digest<fp8>(keys, filled, dim, to);
        }
    }

    static void any_codes(DType dtype, const char* keys, const char* digest, const uint32_t* position, uint32_t channels,
                          uint32_t dim, uint8_t* to) {
        switch (dtype) {
            case DType::bf16: return codes<DType::bf16>(keys, digest, position, channels, dim, to);
            case DType::fp16: return codes<DType::fp16>(keys, digest, position, channels, dim, to);
            case DType::fp32: return codes<DType::fp32>(keys, digest, position, channels, dim, to);
            case DType::fp8_bf16:
            case DType::fp8_fp16:
            case DType::fp8_fp32: return codes<fp8>(keys, digest, position, channels, dim, to);
        }
    }

    static void any_estimate(const EstimateQuery& query, const char* digest, const uint8_t* codes, float* out) {
        switch (query.dtype) {
            case DType::bf16: return estimate<DType::bf16>(query, digest, codes, out);
            case DType::fp16: return estimate<DType::fp16>(query, digest, codes, out);
            case DType::fp32: return estimate<DType::fp32>(query, digest, codes, out);
            case DType::fp8_bf16:
            case DType::fp8_fp16:
            case DType::fp8_fp32: return estimate<fp8>(query, digest, codes, out);
        }
    }

    static void any_to_floats(DType dtype, const char* from, uint32_t count, float* to) {
        switch (dtype) {
            case DType::bf16: return convert<DType::bf16>(from, count, to);
            case DType::fp16: return convert<DType::fp16>(from, count, to);
            case DType::fp32: return convert<DType::fp32>(from, count, to);
            case DType::fp8_bf16:
            case DType::fp8_fp16:
            case DType::fp8_fp32: return convert<fp8>(from, count, to);
        }
    }

    static constexpr HostLoops named(const char* name) { return {name, any_digest, any_codes, any_estimate, any_to_floats}; }
};

}  // namespace
}  // namespace sglang_hybrid
