// Block attention for bf16 on AMX tiles.
//
// Logits: C[token][head] = K . Q^T. Keys are the left operand (16 tokens x 32 dimensions), loaded from the block as
// they lie; queries are packed once as the right one.
//
// Output: a right operand wants pairs of tokens next to each other, which the values are not. But a tile of values as
// they lie (16 tokens x 32 dimensions) is a right operand whose pairs are neighbouring *dimensions*. With the left
// operand (weight, 0) for each token the product is the output's even dimensions, with (0, weight) its odd ones. Both
// are rows of one left operand, of 2 * group rows, or two where the group is above 8. So values are not rearranged.
// (An infinite value in the pool therefore makes its neighbour NaN, not only itself.)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention/avx512_lanes.h"
#include "attention/block_list.h"
#include "attention/exponential.h"
#include "attention/variants.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t tile_rows = 16;
constexpr uint32_t tile_columns = 16;  // of 4 bytes
constexpr uint32_t tile_dims = 32;     // of bf16
constexpr uint32_t row_stride = 64;    // bytes, of tiles in scratch memory
constexpr uint32_t quad = 4;           // heads in a 128-bit lane

// The compiler does not know that tile instructions read and write memory.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfiguration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(uint32_t tile, uint32_t rows_of_it, uint32_t bytes) {
        rows[tile] = static_cast<uint8_t>(rows_of_it);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

// Tiles, by the operand that they hold. Macros, since the instructions name them by literal.
#define LOGITS_LOW 0   // of tokens 0 to 15
#define LOGITS_HIGH 1  // of tokens 16 to 31
#define POOL_LOW 2     // keys or values of tokens 0 to 15
#define POOL_HIGH 3    // keys or values of tokens 16 to 31
#define QUERY 4
// of a group up to 8: even and odd dimensions in one tile
#define WEIGHTS_LOW 5
#define WEIGHTS_HIGH 6
#define OUTPUT 7
// of a larger group
#define WEIGHTS 5
#define OUTPUT_EVEN 6
#define OUTPUT_ODD 7

template <uint32_t dim>
class AmxKernel {
public:
    static void attend(const BlockAttention& work) {
        if (work.count == 0) {
            return answer_empty(work);
        }
        Block block = block_of(work, 0);
        LineStream(block.keys, block_bytes).request_all();
        LineStream(block.values, block_bytes).request_all();

        State state;
        state.start(work);
        BlockRequests ahead(block_ahead(work, 1).keys, nullptr, block_bytes);
        NearLines near;
        state.compute_logits(block, ahead, near);
        ahead.request_all();
        // Between the weights of a block and the use of them are the logits of the next one, so that no step waits for
        // the results of the one before it. Meanwhile lines are requested on two ways: those of the blocks ahead from
        // memory, and those of the next step from the second level, where a few are missing and are asked for again.
        for (uint32_t index = 0; index < work.count; ++index) {
            const Block next = block_ahead(work, index + 1);
            const bool more = index + 1 < work.count;
            find_pages(block_ahead(work, index + 3), row_bytes);  // keys of index + 2 are requested right now
            ahead = BlockRequests(block_ahead(work, index + 2).keys, next.values, block_bytes);
            near = more ? NearLines(next.keys, block_bytes) : NearLines();
            state.compute_weights(block.tokens, ahead, near);
            near = NearLines(block.values, block.tokens * row_bytes);
            if (more) {
                state.compute_logits(next, ahead, near);
            }
            state.add_values(block, ahead);
            ahead.request_all();
            block = next;
        }
        state.finish(work);
    }

private:
    static constexpr uint32_t chunks = dim / tile_dims;
    static constexpr uint32_t row_bytes = dim * 2;
    static constexpr uint32_t block_bytes = block_tokens * row_bytes;
    static constexpr uint32_t block_lines = block_bytes / cache_line;
    // Of the turns that a block takes, 3/8 are requested with its logits, 2/8 with its weights, 3/8 with its values.
    static constexpr uint32_t block_turns = 2 * block_lines / BlockRequests::lines_of_turn;
    static constexpr uint32_t turns_of_tile = block_turns * 3 / 8 / (2 * chunks);
    static constexpr uint32_t turns_of_weights = block_turns * 2 / 8;

    // All of it is uninitialised until start().
    struct State {
        alignas(64) uint32_t query[chunks][tile_rows][tile_columns];     // pairs of dimensions x heads
        alignas(64) float logits[block_tokens][max_group];               // unscaled
        alignas(64) uint32_t weights[2][2 * max_group][tile_columns];    // halves of a block x rows x tokens
        alignas(64) float output[chunks][2 * max_group][tile_columns];   // rows: even dimensions of each head, then odd
        alignas(64) float sums[max_group][tile_columns];                 // of weights, one for each lane
        alignas(64) float highest[max_group];                            // logit so far
        alignas(64) float rescale[max_group];                            // of earlier blocks, when that rises
        alignas(64) char padded_values[block_tokens * row_bytes];        // of a block that is not full
        uint32_t group;
        float scale;

        void start(const BlockAttention& work) {
            group = work.group;
            scale = work.scale;
            pack_query(static_cast<const char*>(work.query));
            const __m512 zero = _mm512_setzero_ps();
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                for (uint32_t row = 0; row < 2 * group; ++row) {
                    _mm512_store_ps(output[chunk][row], zero);
                }
            }
            for (uint32_t head = 0; head < group; ++head) {
                _mm512_store_ps(sums[head], zero);
            }
            // not -inf: the difference of two of them must not be NaN
            _mm512_store_ps(highest, _mm512_set1_ps(-__FLT_MAX__));

            TileConfiguration configuration;
            const uint32_t weight_rows = is_wide() ? group : 2 * group;
            configuration.shape(LOGITS_LOW, tile_rows, padded_group() * 4);
            configuration.shape(LOGITS_HIGH, tile_rows, padded_group() * 4);
            configuration.shape(POOL_LOW, tile_rows, row_stride);
            configuration.shape(POOL_HIGH, tile_rows, row_stride);
            configuration.shape(QUERY, tile_rows, padded_group() * 4);
            configuration.shape(WEIGHTS_LOW, weight_rows, row_stride);
            configuration.shape(WEIGHTS_HIGH, weight_rows, row_stride);
            configuration.shape(OUTPUT, weight_rows, row_stride);
            settle_memory();
            _tile_loadconfig(&configuration);
        }

        bool is_wide() const { return 2 * group > tile_rows; }

        uint32_t padded_group() const { return (group + quad - 1) / quad * quad; }

        // Rows of pairs become columns, a quad of heads at a time.
        void pack_query(const char* rows) {
            for (uint32_t head = 0; head < group; head += quad) {
                for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                    __m512i row[quad];
#pragma GCC unroll 4
                    for (uint32_t i = 0; i < quad; ++i) {
                        const char* pairs = rows + (head + i) * row_bytes + chunk * row_stride;
                        row[i] = head + i < group ? _mm512_loadu_si512(pairs) : _mm512_setzero_si512();
                    }
                    const __m512i ab_low = _mm512_unpacklo_epi32(row[0], row[1]);
                    const __m512i ab_high = _mm512_unpackhi_epi32(row[0], row[1]);
                    const __m512i cd_low = _mm512_unpacklo_epi32(row[2], row[3]);
                    const __m512i cd_high = _mm512_unpackhi_epi32(row[2], row[3]);
                    store_columns(&query[chunk][0][head], _mm512_unpacklo_epi64(ab_low, cd_low));
                    store_columns(&query[chunk][1][head], _mm512_unpackhi_epi64(ab_low, cd_low));
                    store_columns(&query[chunk][2][head], _mm512_unpacklo_epi64(ab_high, cd_high));
                    store_columns(&query[chunk][3][head], _mm512_unpackhi_epi64(ab_high, cd_high));
                }
            }
        }

        // Lanes of `four` are pairs 0, 4, 8, 12 behind `first`; in each lane the four heads.
        static void store_columns(uint32_t* first, __m512i four) {
            constexpr uint32_t stride = 4 * tile_columns;
            _mm_store_si128(reinterpret_cast<__m128i*>(first), _mm512_castsi512_si128(four));
            _mm_store_si128(reinterpret_cast<__m128i*>(first + stride), _mm512_extracti32x4_epi32(four, 1));
            _mm_store_si128(reinterpret_cast<__m128i*>(first + 2 * stride), _mm512_extracti32x4_epi32(four, 2));
            _mm_store_si128(reinterpret_cast<__m128i*>(first + 3 * stride), _mm512_extracti32x4_epi32(four, 3));
        }

        void compute_logits(const Block& block, BlockRequests& ahead, NearLines& near) {
            settle_memory();
            _tile_zero(LOGITS_LOW);
            _tile_zero(LOGITS_HIGH);
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                const char* keys = block.keys + chunk * row_stride;
                _tile_loadd(QUERY, query[chunk], row_stride);
                _tile_loadd(POOL_LOW, keys, row_bytes);
                _tile_dpbf16ps(LOGITS_LOW, POOL_LOW, QUERY);
                ahead.request(turns_of_tile);
                _tile_loadd(POOL_HIGH, keys + tile_rows * row_bytes, row_bytes);
                _tile_dpbf16ps(LOGITS_HIGH, POOL_HIGH, QUERY);
                near.request(block_lines / chunks);
                ahead.request(turns_of_tile);
            }
            _tile_stored(LOGITS_LOW, logits[0], row_stride);
            _tile_stored(LOGITS_HIGH, logits[tile_rows], row_stride);
            settle_memory();
        }

        void compute_weights(uint32_t tokens, BlockRequests& ahead, NearLines& near) {
            const uint32_t quads = (group + quad - 1) / quad;
            const auto request = [&, turns = turns_of_weights / quads / 4, lines = block_lines / quads / 4] {
                ahead.request(turns);
                near.request(lines);
            };
            __mmask16 risen = 0;
            for (uint32_t head = 0; head < group; head += quad) {
                risen |= compute_weights_of_quad(tokens, head, request);
            }
            near.request_all();
            if (risen != 0) {
                rescale_output();
            }
        }

        // Lanes of `part[half][i]` are tokens 16 * half + i, + 4, + 8, + 12; in each lane the four heads.
        // Requests four times.
        template <class Request>
        __mmask16 compute_weights_of_quad(uint32_t tokens, uint32_t head, Request request) {
            __m512 part[2][4];
            const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
#pragma GCC unroll 4
                for (uint32_t i = 0; i < 4; ++i) {
                    const uint32_t token = half * tile_rows + i;
                    __m512 four = _mm512_castps128_ps512(_mm_load_ps(&logits[token][head]));
                    four = _mm512_insertf32x4(four, _mm_load_ps(&logits[token + 4][head]), 1);
                    four = _mm512_insertf32x4(four, _mm_load_ps(&logits[token + 8][head]), 2);
                    four = _mm512_insertf32x4(four, _mm_load_ps(&logits[token + 12][head]), 3);
                    part[half][i] = _mm512_mul_ps(four, factor);
                }
            }
            if (tokens < block_tokens) {
                hide_missing(part, tokens);
            }

            request();
            __m512 most = part[0][0];
#pragma GCC unroll 8
            for (uint32_t i = 1; i < 8; ++i) {
                most = _mm512_max_ps(most, part[i / 4][i % 4]);
            }
            most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0x4e));
            most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0xb1));
            const __m512 before = _mm512_broadcast_f32x4(_mm_load_ps(&highest[head]));
            const __m512 reference = _mm512_max_ps(most, before);
            const __m512 decay = exponential<Avx512Lanes>(_mm512_sub_ps(before, reference));
            _mm_store_ps(&highest[head], _mm512_castps512_ps128(reference));
            _mm_store_ps(&rescale[head], _mm512_castps512_ps128(decay));

            request();
            __m512 x[2][4];  // by head, lanes are tokens in order
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                const __m512 a = _mm512_sub_ps(part[half][0], reference);
                const __m512 b = _mm512_sub_ps(part[half][1], reference);
                const __m512 c = _mm512_sub_ps(part[half][2], reference);
                const __m512 d = _mm512_sub_ps(part[half][3], reference);
                const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                const __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                const __m512d cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                x[half][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low));
                x[half][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low));
                x[half][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
                x[half][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
            }
#pragma GCC unroll 4
            for (uint32_t i = 0; i < quad; ++i) {
                if (i % 2) {
                    request();
                }
                if (head + i < group) {
                    store_weights(head + i, x[0][i], x[1][i]);
                }
            }
            return _mm512_cmp_ps_mask(reference, before, _CMP_NEQ_UQ);
        }

        static void hide_missing(__m512 (&part)[2][4], uint32_t tokens) {
            const __m512i lanes = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
#pragma GCC unroll 8
            for (uint32_t i = 0; i < 8; ++i) {
                const int first = static_cast<int>(i / 4 * tile_rows + i % 4);
                const __m512i token = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
                const __mmask16 missing = _mm512_cmpge_epi32_mask(token, _mm512_set1_epi32(static_cast<int>(tokens)));
                part[i / 4][i % 4] = _mm512_mask_mov_ps(part[i / 4][i % 4], missing, _mm512_set1_ps(-INFINITY));
            }
        }

        // The sum is of the weights as they are, not as bf16 rounds them: LSE must not inherit that error.
        void store_weights(uint32_t head, __m512 x_low, __m512 x_high) {
            const __m512 low = exponential<Avx512Lanes>(x_low);
            const __m512 high = exponential<Avx512Lanes>(x_high);
            const __m512 sum = _mm512_mul_ps(_mm512_load_ps(sums[head]), _mm512_set1_ps(rescale[head]));
            _mm512_store_ps(sums[head], _mm512_add_ps(sum, _mm512_add_ps(low, high)));
            store_rounded(weights[0], head, low);
            store_rounded(weights[1], head, high);
        }

        void store_rounded(uint32_t (*rows)[tile_columns], uint32_t head, __m512 weight) {
            const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(weight), _mm512_set1_epi32(0x8000));
            const __m512i odd = _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
            _mm512_store_si512(rows[head], _mm512_srli_epi32(rounded, 16));
            _mm512_store_si512(rows[group + head], odd);
        }

        void rescale_output() {
            for (uint32_t head = 0; head < group; ++head) {
                const __m512 factor = _mm512_set1_ps(rescale[head]);
                for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                    float* even = output[chunk][head];
                    float* odd = output[chunk][group + head];
                    _mm512_store_ps(even, _mm512_mul_ps(_mm512_load_ps(even), factor));
                    _mm512_store_ps(odd, _mm512_mul_ps(_mm512_load_ps(odd), factor));
                }
            }
        }

        void add_values(const Block& block, BlockRequests& ahead) {
            const char* values = values_or_zero(block, row_bytes, padded_values);
            settle_memory();
            if (is_wide()) {
                add_values_to_wide(values, ahead);
            } else {
                add_values_to_narrow(values, ahead);
            }
            settle_memory();
        }

        void add_values_to_narrow(const char* values, BlockRequests& ahead) {
            _tile_loadd(WEIGHTS_LOW, weights[0], row_stride);
            _tile_loadd(WEIGHTS_HIGH, weights[1], row_stride);
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                _tile_loadd(OUTPUT, output[chunk], row_stride);
                _tile_loadd(POOL_LOW, values + chunk * row_stride, row_bytes);
                _tile_dpbf16ps(OUTPUT, WEIGHTS_LOW, POOL_LOW);
                ahead.request(turns_of_tile);
                _tile_loadd(POOL_HIGH, values + chunk * row_stride + tile_rows * row_bytes, row_bytes);
                _tile_dpbf16ps(OUTPUT, WEIGHTS_HIGH, POOL_HIGH);
                _tile_stored(OUTPUT, output[chunk], row_stride);
                ahead.request(turns_of_tile);
            }
        }

        void add_values_to_wide(const char* values, BlockRequests& ahead) {
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                _tile_loadd(OUTPUT_EVEN, output[chunk][0], row_stride);
                _tile_loadd(OUTPUT_ODD, output[chunk][group], row_stride);
                _tile_loadd(POOL_LOW, values + chunk * row_stride, row_bytes);
                _tile_loadd(WEIGHTS, weights[0][0], row_stride);
                _tile_dpbf16ps(OUTPUT_EVEN, WEIGHTS, POOL_LOW);
                _tile_loadd(WEIGHTS, weights[0][group], row_stride);
                _tile_dpbf16ps(OUTPUT_ODD, WEIGHTS, POOL_LOW);
                ahead.request(turns_of_tile);
                _tile_loadd(POOL_HIGH, values + chunk * row_stride + tile_rows * row_bytes, row_bytes);
                _tile_loadd(WEIGHTS, weights[1][0], row_stride);
                _tile_dpbf16ps(OUTPUT_EVEN, WEIGHTS, POOL_HIGH);
                _tile_loadd(WEIGHTS, weights[1][group], row_stride);
                _tile_dpbf16ps(OUTPUT_ODD, WEIGHTS, POOL_HIGH);
                _tile_stored(OUTPUT_EVEN, output[chunk][0], row_stride);
                _tile_stored(OUTPUT_ODD, output[chunk][group], row_stride);
                ahead.request(turns_of_tile);
            }
        }

        void finish(const BlockAttention& work) {
            _tile_release();  // a thread with tiles in use is slower to switch to
            for (uint32_t head = 0; head < group; ++head) {
                const float sum = _mm512_reduce_add_ps(_mm512_load_ps(sums[head]));
                work.lse[head] = highest[head] + logf(sum);
                const __m512 factor = _mm512_set1_ps(1.0f / sum);
                float* out = work.out + head * dim;
                for (uint32_t chunk = 0; chunk < chunks; ++chunk, out += tile_dims) {
                    __m512 a = _mm512_mul_ps(_mm512_load_ps(output[chunk][head]), factor);
                    __m512 b = _mm512_mul_ps(_mm512_load_ps(output[chunk][group + head]), factor);
                    Avx512Lanes::interleave(a, b);
                    _mm512_storeu_ps(out, a);
                    _mm512_storeu_ps(out + tile_columns, b);
                }
            }
        }
    };
};

}  // namespace

Kernel amx_kernel(DType dtype, uint32_t head_dim) {
    if (dtype != DType::bf16) {
        return nullptr;
    }
    switch (head_dim) {
        case 64: return AmxKernel<64>::attend;
        case 96: return AmxKernel<96>::attend;
        case 128: return AmxKernel<128>::attend;
        case 256: return AmxKernel<256>::attend;
        default: return nullptr;
    }
}

}  // namespace sglang_hybrid
