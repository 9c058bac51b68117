// Compact digests: `compact_digest` of the reference. One block has
//
//   middles  [D]       128 + a whole number from -127 to 127, times the scale of its group of 16 channels
//   steps    [C]       float16, a sixteenth of the range, in the order in which `load_steps` of estimates.cuh reads them
//   scales   [D / 16]  float16
//
// and zeros up to a multiple of 32 bytes, a sector of the L2 cache: 224 with head_dim 128 and 32 channels, where min/max
// digests have 512.
#pragma once

#include <cstdint>

namespace sglang_hybrid::cuda {

// The format of a block's digest.
enum class Format {
    minmax,   // maxima and minima
    compact,  // as above
};

inline constexpr uint32_t compact_levels = 16;  // steps of a range: the number of codes
inline constexpr uint32_t compact_group = 16;  // channels with one scale: the depth of a product on the tensor cores

constexpr __host__ __device__ uint32_t compact_steps(uint32_t dim) { return dim; }
constexpr __host__ __device__ uint32_t compact_scales(uint32_t dim, uint32_t channels) { return dim + 2 * channels; }
constexpr __host__ __device__ uint32_t compact_bytes(uint32_t dim, uint32_t channels) {
    return (compact_scales(dim, channels) + dim / compact_group * 2 + 31) / 32 * 32;
}

// Return the place of a sketch channel's step among the steps: channels r and r + 4 of eight are a pair.
constexpr __host__ __device__ uint32_t step_place(uint32_t channel) {
    return channel / 8 * 8 + channel % 4 * 2 + channel % 8 / 4;
}

}  // namespace sglang_hybrid::cuda
