// Block attention on AMX tiles, for bf16 and for FP8 with queries in bf16.
//
// A block of FP8 is converted to bf16 in the first-level cache, which is exact, and tiles are loaded from the converted block.
//
// Logits: C[token][head] = K . Q^T. Keys are the left operand (16 tokens x 32 dimensions), loaded from the block in place;
// queries are packed once as the right operand.
//
// Output: a right operand needs pairs of tokens next to each other, but values are stored token by token. A tile of values
// loaded in place (16 tokens x 32 dimensions) is a right operand whose pairs are neighbouring *dimensions*. With the left
// operand (weight, 0) for each token, the product is the output's even dimensions; with (0, weight), its odd dimensions. Both
// kinds of rows form one left operand of 2 * group rows, or two operands if the group is above 8. So values need not be
// rearranged. (An infinite value in the pool therefore also makes the output of the neighbouring dimension NaN.)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention/avx512_lanes.h"
#include "attention/block_list.h"
#include "attention/exponential.h"
#include "attention/group_parts.h"
#include "attention/variants.h"

namespace sglang_hybrid {
namespace {

constexpr uint32_t tile_rows = 16;
constexpr uint32_t tile_columns = 16;  // of 4 bytes
constexpr uint32_t tile_dims = 32;     // of bf16
constexpr uint32_t row_stride = 64;    // bytes from row to row of tiles in scratch memory
constexpr uint32_t quad = 4;           // heads in a 128-bit lane

// A logit may be this much above the reference logit, whose weight is 1, before sums and output are scaled down. Weights of up
// to e^8 lose no precision, in bf16 neither. Without this margin, with lists of 8 blocks, three of four blocks would raise the
// highest logit of some head.
constexpr float most_above_reference = 8.0f;

// Barrier against reordering: the compiler does not know that tile instructions read and write memory.
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

// Numbers of the tiles, named after the operands they hold. Macros, since the instructions need literals.
#define LOGITS_LOW 0   // of tokens 0 to 15
#define LOGITS_HIGH 1  // of tokens 16 to 31
#define POOL_LOW 2     // keys or values of tokens 0 to 15
#define POOL_HIGH 3    // keys or values of tokens 16 to 31
#define QUERY 4
// for a group up to 8: even and odd dimensions in one tile
#define WEIGHTS_LOW 5
#define WEIGHTS_HIGH 6
#define OUTPUT 7
// for a larger group
#define WEIGHTS 5
#define OUTPUT_EVEN 6
#define OUTPUT_ODD 7

// Convert 32 FP8 numbers to bf16. For normal numbers only the exponent's bias changes; the eight denormals are looked up.
inline __m512i bf16_of(__m256i fp8) {
    const __m512i denormals = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i bytes = _mm512_cvtepu8_epi16(fp8);
    const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_denormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
    __m512i numbers = _mm512_mask_permutexvar_epi16(normal, is_denormal, magnitude, denormals);
    numbers = _mm512_mask_mov_epi16(numbers, is_nan, _mm512_set1_epi16(0x7fc0));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(numbers, sign);
}

template <DType dtype, uint32_t dim>
class AmxKernel {
  public:
    static void attend(const BlockAttention& work) {
        if (work.count == 0) {
            return answer_empty(work);
        }
        Block block = block_of(work, 0);
        RequestStream ahead(work, block_bytes);
        ahead.allow(0);
        State state;
        state.start(work, ahead);
        NearLines near(block.values);
        state.compute_logits(block, ahead, near);
        // The logits of the next block are computed between the weights of a block and their use, so that no step
        // waits for the results of the step before. Meanwhile lines are prefetched in two ways: those of the blocks
        // ahead from memory, and those of the next step from the second-level cache, where a few are missing and are
        // thereby requested again.
        for (uint32_t index = 0; index < work.count; ++index) {
            const bool more = index + 1 < work.count;
            const Block next = more ? block_of(work, index + 1) : Block{};
            find_pages(block_ahead(work, index + 4), pool_row_bytes);  // keys of index + 3 may be requested right now
            ahead.allow(index + 1);
            near = NearLines(next.keys);
            state.compute_weights(block.tokens, index == 0, ahead, near);
            if (more) {
                near = NearLines(index == 0 ? nullptr : block.values);
                state.compute_logits(next, ahead, near);
            }
            state.add_values(block, index == 0, ahead);
            block = next;
        }
        ahead.enter_next_list();
        state.finish(work, ahead);
        ahead.leave();
    }

  private:
    static constexpr uint32_t chunks = dim / tile_dims;
    static constexpr bool converts = is_fp8(dtype);
    static constexpr uint32_t row_bytes = dim * 2;  // of what tiles are loaded from
    static constexpr uint32_t pool_row_bytes = dim * bytes_of(dtype);
    static constexpr uint32_t block_bytes = block_tokens * pool_row_bytes;
    static constexpr uint32_t block_lines = block_bytes / cache_line;
    // Of the turns of a block, 3/8 are requested with its logits, 2/8 with its weights and 3/8 with its values. About a
    // quarter of a block's turns is requested at the beginning and at the end of a list.
    static constexpr uint32_t block_turns = 2 * block_lines / RequestStream::lines_of_turn;
    static constexpr uint32_t turns_of_tile = block_turns * 3 / 8 / (2 * chunks);
    static constexpr uint32_t turns_of_weights = block_turns * 2 / 8;
    static constexpr uint32_t turns_between = block_turns / 4;
    // FP8 has half the lines, and shares of the turns round down; so up to all of a block's turns are requested during
    // conversion.
    static constexpr uint32_t rows_of_conversion = 8;
    static constexpr uint32_t turns_of_conversion = block_turns / (2 * block_tokens / rows_of_conversion);

    // Uninitialised until start().
    struct State {
        alignas(64) uint32_t query[chunks][tile_rows][tile_columns];     // pairs of dimensions x heads
        alignas(64) float logits[block_tokens * max_group];              // of each token and head, unscaled
        alignas(64) uint32_t weights[2][2 * max_group][tile_columns];    // halves of a block x rows x tokens
        alignas(64) float output[chunks][2 * max_group][tile_columns];   // rows: even dimensions of each head, then odd
        alignas(64) float sums[max_group][tile_columns];                 // sums of weights, one for each lane
        alignas(64) float reference[max_group];                          // logit whose weight is 1, unscaled
        alignas(64) char padded_values[block_tokens * row_bytes];        // of a block that is not full, or is converted
        alignas(64) char converted_keys[converts ? block_tokens * row_bytes : 64];
        uint32_t group;
        float scale;             // absolute value: for a negative scale the query's sign is changed instead
        float highest_above;     // most that an unscaled logit may be above the reference, see most_above_reference

        void start(const BlockAttention& work, RequestStream& ahead) {
            group = work.group;
            scale = fabsf(work.scale);
            highest_above = fminf(most_above_reference / scale, 1e30f);
            pack_query(static_cast<const char*>(work.query), work.scale < 0, block_of(work, 0).keys, ahead);
            for (uint32_t head = 0; head < group; ++head) {
                _mm512_store_ps(sums[head], _mm512_setzero_ps());
            }
            // not -inf: the difference of two references must not be NaN
            _mm512_store_ps(reference, _mm512_set1_ps(-__FLT_MAX__));

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

        uint32_t quads() const { return is_wide() ? (group + quad - 1) / quad : 2; }

        uint32_t padded_group() const { return quads() * quad; }

        // Transpose the query: rows of dimension pairs become columns, a quad of heads at a time.
        void pack_query(const char* rows, bool negative, const char* first_keys, RequestStream& ahead) {
            NearLines near(first_keys);
            const __m512i sign = _mm512_set1_epi16(negative ? static_cast<short>(0x8000) : 0);
            const uint32_t turns = turns_between / (quads() * chunks);
            for (uint32_t head = 0; head < padded_group(); head += quad) {
                for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                    ahead.request(turns);
                    if (head == 0) {
                        near.request<block_lines / chunks>();
                    }
                    __m512i row[quad];
#pragma GCC unroll 4
                    for (uint32_t i = 0; i < quad; ++i) {
                        const char* pairs = rows + (head + i) * row_bytes + chunk * row_stride;
                        row[i] = head + i < group ? _mm512_xor_si512(_mm512_loadu_si512(pairs), sign) : _mm512_setzero_si512();
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

        // 128-bit lane i of `four` holds dimension pair 4 * i behind `first`, of four heads.
        static void store_columns(uint32_t* first, __m512i four) {
            constexpr uint32_t stride = 4 * tile_columns;
            _mm_store_si128(reinterpret_cast<__m128i*>(first), _mm512_castsi512_si128(four));
            _mm_store_si128(reinterpret_cast<__m128i*>(first + stride), _mm512_extracti32x4_epi32(four, 1));
            _mm_store_si128(reinterpret_cast<__m128i*>(first + 2 * stride), _mm512_extracti32x4_epi32(four, 2));
            _mm_store_si128(reinterpret_cast<__m128i*>(first + 3 * stride), _mm512_extracti32x4_epi32(four, 3));
        }

        // Convert the first `tokens` rows of a block to bf16.
        static void convert(const char* from, uint32_t tokens, char* to, RequestStream& ahead) {
            for (uint32_t row = 0; row < tokens; ++row) {
                if (row % rows_of_conversion == 0) {
                    ahead.request(turns_of_conversion);
                }
#pragma GCC unroll 8
                for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                    const char* const numbers = from + row * pool_row_bytes + chunk * tile_dims;
                    const __m256i fp8 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
                    _mm512_store_si512(to + row * row_bytes + chunk * row_stride, bf16_of(fp8));
                }
            }
        }

        void compute_logits(const Block& block, RequestStream& ahead, NearLines& near) {
            const char* rows = block.keys;
            if constexpr (converts) {
                convert(block.keys, block_tokens, converted_keys, ahead);
                rows = converted_keys;
            }
            settle_memory();
            _tile_zero(LOGITS_LOW);
            _tile_zero(LOGITS_HIGH);
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                const char* keys = rows + chunk * row_stride;
                _tile_loadd(QUERY, query[chunk], row_stride);
                _tile_loadd(POOL_LOW, keys, row_bytes);
                _tile_dpbf16ps(LOGITS_LOW, POOL_LOW, QUERY);
                ahead.request(turns_of_tile);
                _tile_loadd(POOL_HIGH, keys + tile_rows * row_bytes, row_bytes);
                _tile_dpbf16ps(LOGITS_HIGH, POOL_HIGH, QUERY);
                near.request<block_lines / chunks>();
                ahead.request(turns_of_tile);
            }
            // store the logits without gaps between tokens
            _tile_stored(LOGITS_LOW, logits, padded_group() * 4);
            _tile_stored(LOGITS_HIGH, logits + tile_rows * padded_group(), padded_group() * 4);
            settle_memory();
        }

        void compute_weights(uint32_t tokens, bool first, RequestStream& ahead, NearLines& near) {
            if (!is_wide()) {
                return compute_weights_of_eight(tokens, first, [&] {
                    ahead.request(turns_of_weights / 8);
                    near.request<block_lines / 8>();
                });
            }
            with_constant<max_group / quad>(quads(), [&](auto quads) {
                constexpr uint32_t steps = 4 * quads.value;
                const auto request = [&] {
                    ahead.request(turns_of_weights / steps);
                    near.request<block_lines / steps>();
                };
                for (uint32_t head = 0; head < group; head += quad) {
                    compute_weights_of_quad(tokens, first, head, request);
                }
                near.request<block_lines % steps>();
            });
        }

        // Compute the weights of a group up to 8. pair[i] holds tokens 2 * i and 2 * i + 1, eight heads of each. Calls
        // request() eight times.
        template <class Request>
        void compute_weights_of_eight(uint32_t tokens, bool first, Request request) {
            __m512 pair[16];
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 16; ++i) {
                pair[i] = _mm512_load_ps(logits + i * 16);
            }
            if (tokens < block_tokens) {
                const __m512i lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
#pragma GCC unroll 16
                for (uint32_t i = 0; i < 16; ++i) {
                    const __m512i end = _mm512_set1_epi32(static_cast<int>(tokens) - static_cast<int>(2 * i));
                    const __mmask16 missing = _mm512_cmpge_epi32_mask(lanes, end);
                    pair[i] = _mm512_mask_mov_ps(pair[i], missing, _mm512_set1_ps(-INFINITY));
                }
            }
            request();
            __m512 most[4];
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; ++i) {
                most[i] = _mm512_max_ps(_mm512_max_ps(pair[i], pair[i + 4]), _mm512_max_ps(pair[i + 8], pair[i + 12]));
            }
            most[0] = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
            most[0] = _mm512_max_ps(most[0], _mm512_shuffle_f32x4(most[0], most[0], 0x4e));
            raise_reference(first, 0, _mm512_castps512_ps256(most[0]));

            request();
            // part[head][quarter]: for each quarter of the block, tokens 0, 2, 4, 6 of `head`, then of head + 4, then
            // tokens 1, 3, 5, 7 of both
            __m512 part[4][4];
#pragma GCC unroll 4
            for (uint32_t quarter = 0; quarter < 4; ++quarter) {
                const __m512* four = pair + 4 * quarter;
                const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(four[0], four[1]));
                const __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(four[0], four[1]));
                const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(four[2], four[3]));
                const __m512d cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(four[2], four[3]));
                part[0][quarter] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low));
                part[1][quarter] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low));
                part[2][quarter] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
                part[3][quarter] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
            }
            request();
            const __m512i low = _mm512_set_epi32(27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
            const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
#pragma GCC unroll 4
            for (uint32_t head = 0; head < 4; ++head) {
                request();
                const __m512(&quarters)[4] = part[head];
                if (head < group) {
                    store_weights(head, _mm512_permutex2var_ps(quarters[0], low, quarters[1]),
                                  _mm512_permutex2var_ps(quarters[2], low, quarters[3]));
                }
                if (head + 4 < group) {
                    store_weights(head + 4, _mm512_permutex2var_ps(quarters[0], high, quarters[1]),
                                  _mm512_permutex2var_ps(quarters[2], high, quarters[3]));
                }
            }
            request();
        }

        // Compute the weights of four heads. The 128-bit lanes of part[half][i] are tokens 16 * half + i, + 4, + 8 and
        // + 12, each with four heads. Calls request() four times.
        template <class Request>
        void compute_weights_of_quad(uint32_t tokens, bool first, uint32_t head, Request request) {
            __m512 part[2][4];
            const uint32_t stride = padded_group();
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
#pragma GCC unroll 4
                for (uint32_t i = 0; i < 4; ++i) {
                    const float* token = logits + (half * tile_rows + i) * stride + head;
                    __m512 four = _mm512_castps128_ps512(_mm_load_ps(token));
                    four = _mm512_insertf32x4(four, _mm_load_ps(token + 4 * stride), 1);
                    four = _mm512_insertf32x4(four, _mm_load_ps(token + 8 * stride), 2);
                    part[half][i] = _mm512_insertf32x4(four, _mm_load_ps(token + 12 * stride), 3);
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
            raise_reference(first, head, _mm512_castps512_ps128(most));

            request();
            __m512 x[2][4];  // [half][head], lanes are tokens in order
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(part[half][0], part[half][1]));
                const __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(part[half][0], part[half][1]));
                const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(part[half][2], part[half][3]));
                const __m512d cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(part[half][2], part[half][3]));
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
        }

        // Raise the references of heads whose highest logit in this block is too far above them, and scale down these
        // heads' sums and output. `most`: the highest logits of this block, of four or eight heads from `head` on.
        template <class Vector>
        void raise_reference(bool first, uint32_t head, Vector most) {
            constexpr uint32_t heads = sizeof(Vector) / sizeof(float);
            alignas(sizeof(Vector)) float logit[heads];
            memcpy(logit, &most, sizeof(most));
            Vector before;
            memcpy(&before, &reference[head], sizeof(before));
            const auto risen = most > before + highest_above;
            uint64_t bits[sizeof(Vector) / 8];
            memcpy(bits, &risen, sizeof(risen));
            uint64_t any = 0;
            for (const uint64_t word : bits) {
                any |= word;
            }
            if (any == 0) {
                return;
            }
            for (uint32_t i = 0; i < heads && head + i < group; ++i) {
                const float old = reference[head + i];
                if (!(logit[i] > old + highest_above)) {
                    continue;
                }
                reference[head + i] = logit[i];
                if (!first) {
                    rescale(head + i, _mm512_cvtss_f32(weights_of(_mm512_set1_ps(old), head + i)));
                }
            }
        }

        // Set the logits of tokens behind the block's last token to -inf.
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

        // Return exp(scale * (logit - reference)), computed as a power of two: relative error 2e-7 besides that of the
        // product. Exactly 1 at the reference; 0 where the result would be denormal, at -inf and for NaN.
        __m512 weights_of(__m512 logit, uint32_t head) const {
            const auto constant = [](float value) { return _mm512_set1_ps(value); };
            const __m512 x = _mm512_sub_ps(logit, constant(reference[head]));
            const __m512 factor = constant(scale * 1.44269504f);
            // adding this number rounds to an integer, which is left in the lowest bits
            const __m512 shift = constant(12582912.0f);
            const __m512 shifted = _mm512_fmadd_ps(x, factor, shift);
            const __m512 rest = _mm512_fmsub_ps(x, factor, _mm512_sub_ps(shifted, shift));
            __m512 value = constant(0.001326472731307149f);
            value = _mm512_fmadd_ps(value, rest, constant(0.009671512991189957f));
            value = _mm512_fmadd_ps(value, rest, constant(0.05550733581185341f));
            value = _mm512_fmadd_ps(value, rest, constant(0.24022242426872253f));
            value = _mm512_fmadd_ps(value, rest, constant(0.6931470036506653f));
            value = _mm512_fmadd_ps(value, rest, constant(1.0f));
            // with powers below -125 the result would be denormal
            const __mmask16 kept = _mm512_cmp_ps_mask(shifted, constant(12582912.0f - 125.0f), _CMP_GE_OQ);
            return _mm512_castsi512_ps(
                _mm512_maskz_add_epi32(kept, _mm512_castps_si512(value), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
        }

        // Sums add the exact weights, not the weights rounded to bf16: the LSE must not have the rounding error.
        void store_weights(uint32_t head, __m512 low_logits, __m512 high_logits) {
            const __m512 low = weights_of(low_logits, head);
            const __m512 high = weights_of(high_logits, head);
            _mm512_store_ps(sums[head], _mm512_add_ps(_mm512_load_ps(sums[head]), _mm512_add_ps(low, high)));
            store_rounded(weights[0], head, low);
            store_rounded(weights[1], head, high);
        }

        void store_rounded(uint32_t (*rows)[tile_columns], uint32_t head, __m512 weight) {
            const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(weight), _mm512_set1_epi32(0x8000));
            const __m512i odd = _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
            _mm512_store_si512(rows[head], _mm512_srli_epi32(rounded, 16));
            _mm512_store_si512(rows[group + head], odd);
        }

        // Scale down the sums and the output of earlier blocks.
        void rescale(uint32_t head, float by) {
            const __m512 factor = _mm512_set1_ps(by);
            const auto scale_down = [&](float* numbers) {
                _mm512_store_ps(numbers, _mm512_mul_ps(_mm512_load_ps(numbers), factor));
            };
            scale_down(sums[head]);
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                scale_down(output[chunk][head]);
                scale_down(output[chunk][group + head]);
            }
        }

        // Add the block's weighted values to the output. `first`: this is the list's first block, and the output is
        // undefined.
        void add_values(const Block& block, bool first, RequestStream& ahead) {
            const char* values = padded_values;
            if constexpr (converts) {
                convert(block.values, block.tokens, padded_values, ahead);
                memset(padded_values + block.tokens * row_bytes, 0, (block_tokens - block.tokens) * row_bytes);
            } else {
                values = values_or_zero(block, row_bytes, padded_values);
            }
            settle_memory();
            if (is_wide()) {
                add_values_to_wide(values, first, ahead);
            } else {
                add_values_to_narrow(values, first, ahead);
            }
            settle_memory();
        }

        void add_values_to_narrow(const char* values, bool first, RequestStream& ahead) {
            _tile_loadd(WEIGHTS_LOW, weights[0], row_stride);
            _tile_loadd(WEIGHTS_HIGH, weights[1], row_stride);
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                if (first) {
                    _tile_zero(OUTPUT);
                } else {
                    _tile_loadd(OUTPUT, output[chunk], row_stride);
                }
                _tile_loadd(POOL_LOW, values + chunk * row_stride, row_bytes);
                _tile_dpbf16ps(OUTPUT, WEIGHTS_LOW, POOL_LOW);
                ahead.request(turns_of_tile);
                _tile_loadd(POOL_HIGH, values + chunk * row_stride + tile_rows * row_bytes, row_bytes);
                _tile_dpbf16ps(OUTPUT, WEIGHTS_HIGH, POOL_HIGH);
                _tile_stored(OUTPUT, output[chunk], row_stride);
                ahead.request(turns_of_tile);
            }
        }

        void add_values_to_wide(const char* values, bool first, RequestStream& ahead) {
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                if (first) {
                    _tile_zero(OUTPUT_EVEN);
                    _tile_zero(OUTPUT_ODD);
                } else {
                    _tile_loadd(OUTPUT_EVEN, output[chunk][0], row_stride);
                    _tile_loadd(OUTPUT_ODD, output[chunk][group], row_stride);
                }
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

        void finish(const BlockAttention& work, RequestStream& ahead) {
            _tile_release();  // switching to a thread with tiles in use is slower
            const uint32_t turns = turns_between / group;
            for (uint32_t head = 0; head < group; ++head) {
                ahead.request(turns);
                const float sum = _mm512_reduce_add_ps(_mm512_load_ps(sums[head]));
                work.lse[head] = reference[head] * scale + logf(sum);
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

template <DType dtype>
Kernel amx_kernel_of(uint32_t head_dim) {
    switch (head_dim) {
        case 64: return AmxKernel<dtype, 64>::attend;
        case 96: return AmxKernel<dtype, 96>::attend;
        case 128: return AmxKernel<dtype, 128>::attend;
        case 256: return AmxKernel<dtype, 256>::attend;
        default: return nullptr;
    }
}

}  // namespace

// Only for queries in bf16: tiles would round queries of other dtypes.
Kernel amx_kernel(DType dtype, uint32_t head_dim) {
    switch (dtype) {
        case DType::bf16: return amx_kernel_of<DType::bf16>(head_dim);
        case DType::fp8_bf16: return amx_kernel_of<DType::fp8_bf16>(head_dim);
        default: return nullptr;
    }
}

}  // namespace sglang_hybrid
