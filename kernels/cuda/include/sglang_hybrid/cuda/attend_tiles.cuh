// Shared memory of attention: tiles of keys and values, queries, and results of warps in the memory of their tiles.
#pragma once

#include "sglang_hybrid/block_attention.h"
#include "sglang_hybrid/cuda/elements.cuh"
#include "sglang_hybrid/cuda/fp8.cuh"
#include "sglang_hybrid/cuda/memory.cuh"
#include "sglang_hybrid/cuda/slot_codes.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t warp_size = 32;
inline constexpr uint32_t attend_warps = 4;  // most warps of a CTA
inline constexpr uint32_t attend_tiles = 3;  // tiles of a warp
inline constexpr uint32_t query_rows = 16;
inline constexpr uint32_t token_factor_bytes = block_tokens * sizeof(uint16_t);  // of a tile
inline constexpr float lowest_logit = -3.0e38f;
inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

// -- tiles in shared memory --------------------------------------------------------------------------------------------

// A tile [rows][kDim] of values of kBytes bytes, in chunks of 16 bytes. Chunks of a row are permuted, so that eight rows of one
// column of chunks, which a matrix load reads, lie in different banks.
template <int kDim, uint32_t kBytes = 2>
struct Tile {
    static constexpr uint32_t row_bytes = kDim * kBytes;
    static constexpr uint32_t row_chunks = row_bytes / 16;
    static constexpr uint32_t bytes = block_tokens * row_bytes;

    static __device__ uint32_t place(uint32_t row, uint32_t chunk) {
        // rows of bytes that are no multiple of 128 begin at two or four different banks already, and have fewer chunks that
        // could be permuted
        const uint32_t turn = row_bytes % 128 == 0 ? row & 7 : row_bytes % 64 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
        return (row * row_chunks + (chunk ^ turn)) * 16;
    }

    // Begin the copy of a block to a tile. Tokens that do not count become zeros, whatever memory holds. Called by one warp.
    template <class Counts>
    static __device__ void request(uint32_t tile, const void* block, Counts counts, uint32_t lane, uint64_t policy) {
#pragma unroll
        for (uint32_t i = 0; i < row_chunks; ++i) {
            const uint32_t chunk = i * warp_size + lane;
            const uint32_t token = chunk / row_chunks;
            copy_async(tile + place(token, chunk % row_chunks), static_cast<const char*>(block) + chunk * 16, counts(token),
                       policy);
        }
    }
};

// Output of a warp at the end of a pair, in the memory of its tiles: [query rows][kDim] of float. Rows begin at different
// banks.
template <int kDim>
struct OutRows {
    static constexpr uint32_t stride = kDim + 8;
    static_assert(query_rows * stride * sizeof(float) <= attend_tiles * Tile<kDim, 1>::bytes);

    // Load four channels of a row; `quad` counts groups of four channels over all rows.
    static __device__ float4 load(const char* of_warp, uint32_t quad) {
        constexpr uint32_t of_row = kDim / 4;
        return reinterpret_cast<const float4*>(of_warp)[quad / of_row * (stride / 4) + quad % of_row];
    }
};

struct SharedMemory {
    uint32_t query;    // [16][kDim]
    uint32_t factors;  // [16] float: what products of each row have to be multiplied by; only with numbers of one byte
    uint32_t maxima;   // [warps][16] float
    uint32_t sums;     // [warps][16] float
    uint32_t tiles;    // [warps][3]
    uint32_t token_factors;  // [warps][3][32] float16: of the tokens of tiles of codes
    uint32_t bytes;

    // `of_value`: bytes of a number in keys and values.
    __host__ __device__ SharedMemory(uint32_t head_dim, uint32_t warps, uint32_t of_value) {
        query = 0;
        factors = query + query_rows * head_dim * 2;
        maxima = factors + (of_value == 1 ? query_rows * sizeof(float) : 0);
        sums = maxima + warps * query_rows * sizeof(float);
        tiles = sums + warps * query_rows * sizeof(float);
        token_factors = tiles + warps * attend_tiles * block_tokens * head_dim * of_value;
        bytes = token_factors + (of_value == 1 ? warps * attend_tiles * token_factor_bytes : 0);
    }
};

}  // namespace sglang_hybrid::cuda
