// Attention of one warp to tiles of keys and values in shared memory, by online softmax on the tensor cores.
#pragma once

#include "sglang_hybrid/cuda/attend_tiles.cuh"
#include "sglang_hybrid/cuda/scaled_queries.cuh"

namespace sglang_hybrid::cuda {

// The type in which products with an Element are computed.
template <class Element>
struct ProductOf {
    using type = Element;
};
template <>
struct ProductOf<Fp8> {
    using type = Float16;
};
template <>
struct ProductOf<Coded> {
    using type = Float16;
};

// Attention of a warp by online softmax over the tiles that are added. Logits are in units of log2. A lane has two rows of the
// product.
template <class Element, int kDim>
class WarpAttention {
    using Product = typename ProductOf<Element>::type;
    using BlockTile = Tile<kDim, value_bytes<Element>>;
    static constexpr bool is_byte = value_bytes<Element> == 1;

  public:
    static constexpr uint32_t dim_steps = kDim / 16;  // of a product over channels
    static constexpr uint32_t token_tiles = block_tokens / 8;

    // `factors`: of the query's rows, as write_scaled_queries writes them; used with numbers of one byte only.
    __device__ WarpAttention(uint32_t query, float scale, const float* factors) : query_(query) {
        scales_[0] = scale * log2_e;
        if constexpr (is_byte) {
            const uint32_t row = threadIdx.x % warp_size / 4;
            scales_[1] = scales_[0] * factors[row + 8] * Element::unit;
            scales_[0] *= factors[row] * Element::unit;
        }
    }

    // Set the bias [group] that is added to logits of keys that are added `with_bias`; null: there is none.
    __device__ void set_bias(const float* bias, uint32_t group) {
        const uint32_t row = threadIdx.x % warp_size / 4;
        if (bias && row < group) bias_[0] = bias[row] * log2_e;
        if (bias && row + 8 < group) bias_[1] = bias[row + 8] * log2_e;
    }

    // `factors`: of the tile's tokens, in shared memory; used with codes only.
    template <class Counts>
    __device__ void add_keys(uint32_t tile, Counts counts, bool with_bias, const char* factors) {
        const uint32_t lane = threadIdx.x % warp_size;
        const uint32_t query_row = (lane & 7) + (lane >> 3 & 1) * 8, query_chunk = lane >> 4;
#pragma unroll
        for (uint32_t i = 0; i < token_tiles; ++i) weights_[i][0] = weights_[i][1] = weights_[i][2] = weights_[i][3] = 0;
#pragma unroll
        for (uint32_t step = 0; step < dim_steps; ++step) {
            uint32_t query[4];
            load_matrices(query, query_ + Tile<kDim>::place(query_row, 2 * step + query_chunk));
            multiply_keys(query, tile, step);
        }
        if constexpr (is_coded<Element>) multiply_tokens(factors);
        to_weights(counts, lane % 4 * 2, with_bias ? bias_[0] : 0, with_bias ? bias_[1] : 0);
    }

    __device__ void add_values(uint32_t tile, const char* factors) {
        if constexpr (is_coded<Element>) multiply_tokens(factors);
        if constexpr (is_byte) add_byte_values(tile);
        else add_16_bit_values(tile);
    }

    // Write maximum and sum of each row to arrays [16]. The output is relative to that maximum.
    __device__ void write_sums(float* maxima, float* sums) {
        const uint32_t lane = threadIdx.x % warp_size;
#pragma unroll
        for (uint32_t side = 0; side < 2; ++side) {
            float sum = sum_[side];
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
            if (lane % 4) continue;
            maxima[lane / 4 + 8 * side] = maximum_[side];
            sums[lane / 4 + 8 * side] = sum;
        }
    }

    // Write the output [rows][kDim], each row multiplied by factor(row); rows are OutRows<kDim>::stride apart. `steps`: of the
    // values' codes, [kDim]; not read if values are no codes.
    template <class Factor>
    __device__ void write_out(float* out, uint32_t rows, const float* steps, Factor factor) const {
        const uint32_t lane = threadIdx.x % warp_size;
#pragma unroll
        for (uint32_t side = 0; side < 2; ++side) {
            const uint32_t row = lane / 4 + 8 * side;
            if (row >= rows) continue;
            const float weight = factor(row);
            if constexpr (is_byte) {
                write_byte_row(out + row * OutRows<kDim>::stride, side, weight * Element::unit, steps);
            } else {
#pragma unroll
                for (uint32_t i = 0; i < kDim / 8; ++i) {
                    *reinterpret_cast<float2*>(out + row * OutRows<kDim>::stride + i * 8 + lane % 4 * 2) =
                        make_float2(out_[i][2 * side] * weight, out_[i][2 * side + 1] * weight);
                }
            }
        }
    }

  private:
    // Multiply what each token has in weights_ by the token's factor.
    __device__ void multiply_tokens(const char* factors) {
#pragma unroll
        for (uint32_t i = 0; i < token_tiles; ++i) {
            const uint32_t pair = reinterpret_cast<const uint32_t*>(factors)[i * 4 + threadIdx.x % 4];
            const float first = widened<Float16>(static_cast<uint16_t>(pair));
            const float second = widened<Float16>(static_cast<uint16_t>(pair >> 16));
            weights_[i][0] *= first, weights_[i][1] *= second, weights_[i][2] *= first, weights_[i][3] *= second;
        }
    }

    // Add the products of 16 channels, for all tokens.
    __device__ void multiply_keys(const uint32_t (&query)[4], uint32_t tile, uint32_t step) {
        const uint32_t lane = threadIdx.x % warp_size;
        if constexpr (is_byte) {
            uint32_t words[token_tiles];  // four consecutive channels, for which the query is ordered
            load_matrices(words, tile + BlockTile::place(lane, step));
#pragma unroll
            for (uint32_t i = 0; i < token_tiles; ++i) {
                uint32_t keys[2];
                Element::widen(keys, words[i]);
                Product::multiply_add(weights_[i], query, keys[0], keys[1]);
            }
        } else {
            const uint32_t token = (lane & 7) + (lane >> 4) * 8, key_chunk = lane >> 3 & 1;
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                uint32_t keys[4];
                load_matrices(keys, tile + BlockTile::place(half * 16 + token, 2 * step + key_chunk));
                Product::multiply_add(weights_[2 * half], query, keys[0], keys[1]);
                Product::multiply_add(weights_[2 * half + 1], query, keys[2], keys[3]);
            }
        }
    }

    __device__ void add_16_bit_values(uint32_t tile) {
        const uint32_t lane = threadIdx.x % warp_size;
        const uint32_t token = (lane & 7) + (lane >> 3 & 1) * 8, chunk = lane >> 4;
#pragma unroll
        for (uint32_t step = 0; step < block_tokens / 16; ++step) {
            uint32_t weights[4];
            pack_weights(weights, step);
#pragma unroll
            for (uint32_t pair = 0; pair < kDim / 16; ++pair) {
                uint32_t values[4];
                load_matrices_transposed(values, tile + BlockTile::place(step * 16 + token, 2 * pair + chunk));
                Product::multiply_add(out_[2 * pair], weights, values[0], values[1]);
                Product::multiply_add(out_[2 * pair + 1], weights, values[2], values[3]);
            }
        }
    }

    // A matrix that is transposed in units of 16 bits has two channels of two tokens in a word: the products get the even
    // channels of 16 first, then the odd ones.
    __device__ void add_byte_values(uint32_t tile) {
        uint32_t weights[2][4];
        pack_weights(weights[0], 0);
        pack_weights(weights[1], 1);
#pragma unroll
        for (uint32_t chunk = 0; chunk < kDim / 16; ++chunk) {
            uint32_t words[token_tiles];
            load_matrices_transposed(words, tile + BlockTile::place(threadIdx.x % warp_size, chunk));
#pragma unroll
            for (uint32_t step = 0; step < 2; ++step) {
                uint32_t first[2], second[2];  // of 16 tokens
                Element::widen_across(first, words[2 * step]);
                Element::widen_across(second, words[2 * step + 1]);
                Product::multiply_add(out_[2 * chunk], weights[step], first[0], second[0]);
                Product::multiply_add(out_[2 * chunk + 1], weights[step], first[1], second[1]);
            }
        }
    }

    __device__ void write_byte_row(float* row, uint32_t side, float weight, const float* steps) const {
#pragma unroll
        for (uint32_t chunk = 0; chunk < kDim / 16; ++chunk) {
            const float (&even)[4] = out_[2 * chunk];
            const float (&odd)[4] = out_[2 * chunk + 1];
            const uint32_t quad = chunk * 4 + threadIdx.x % 4;
            float4 of = make_float4(weight, weight, weight, weight);
            if constexpr (is_coded<Element>) {
                const float4 step = reinterpret_cast<const float4*>(steps)[quad];
                of.x *= step.x, of.y *= step.y, of.z *= step.z, of.w *= step.w;
            }
            reinterpret_cast<float4*>(row)[quad] =
                make_float4(even[2 * side] * of.x, odd[2 * side] * of.y, even[2 * side + 1] * of.z, odd[2 * side + 1] * of.w);
        }
    }

    // Pack the weights of 16 tokens as an operand of the products.
    __device__ void pack_weights(uint32_t (&to)[4], uint32_t step) const {
        const float (&left)[4] = weights_[2 * step];
        const float (&right)[4] = weights_[2 * step + 1];
        to[0] = Product::pack(left[0], left[1]), to[1] = Product::pack(left[2], left[3]);
        to[2] = Product::pack(right[0], right[1]), to[3] = Product::pack(right[2], right[3]);
    }

    template <class Counts>
    __device__ void to_weights(Counts counts, uint32_t column, float upper_bias, float lower_bias) {
        float highest[2] = {maximum_[0], maximum_[1]};
#pragma unroll
        for (uint32_t i = 0; i < token_tiles; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                weights_[i][j] = counts(i * 8 + column + j % 2)
                                     ? fmaf(weights_[i][j], scales_[is_byte ? j / 2 : 0], j / 2 ? lower_bias : upper_bias)
                                     : -INFINITY;
                highest[j / 2] = fmaxf(highest[j / 2], weights_[i][j]);
            }
        }
        bool raised = false;
        float factor[2];
#pragma unroll
        for (uint32_t side = 0; side < 2; ++side) {
            highest[side] = fmaxf(highest[side], __shfl_xor_sync(0xFFFFFFFF, highest[side], 1));
            highest[side] = fmaxf(highest[side], __shfl_xor_sync(0xFFFFFFFF, highest[side], 2));
            raised |= highest[side] != maximum_[side];
            // a row whose logits are all -inf (its keys overflowed) has no weights
            factor[side] = highest[side] == -INFINITY ? 1.0f : exp2f(maximum_[side] - highest[side]);
            sum_[side] *= factor[side];
            maximum_[side] = highest[side];
        }
#pragma unroll
        for (uint32_t i = 0; i < token_tiles; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                weights_[i][j] = highest[j / 2] == -INFINITY ? 0.0f : exp2f(weights_[i][j] - highest[j / 2]);
                sum_[j / 2] += weights_[i][j];
            }
        }
        if (!__any_sync(0xFFFFFFFF, raised)) return;  // the usual case after the first few blocks
#pragma unroll
        for (uint32_t i = 0; i < kDim / 8; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) out_[i][j] *= factor[j / 2];
        }
    }

    const uint32_t query_;
    float scales_[is_byte ? 2 : 1];  // of logits, of both rows
    float weights_[token_tiles][4];
    float out_[kDim / 8][4] = {};
    float maximum_[2] = {-INFINITY, -INFINITY};
    float sum_[2] = {0, 0};  // of this lane's columns
    float bias_[2] = {0, 0};
};

}  // namespace sglang_hybrid::cuda
