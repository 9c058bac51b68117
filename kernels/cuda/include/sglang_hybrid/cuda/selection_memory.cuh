// Shared memory of a CTA that selects blocks of one (row, KV head).
#pragma once

#include "sglang_hybrid/cuda/best_blocks.cuh"
#include "sglang_hybrid/cuda/slot_table.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t most_selected = select_threads;  // one thread for each block
inline constexpr uint32_t most_slots = select_threads;

// A set of positions of a row, one bit each.
class PositionSet {
  public:
    __device__ explicit PositionSet(uint32_t* words) : words_(words) {}
    static __host__ __device__ uint32_t words(uint32_t max_blocks) { return (max_blocks + 31) / 32; }
    __device__ void clear(uint32_t max_blocks) {
        for (uint32_t i = threadIdx.x; i < words(max_blocks); i += blockDim.x) words_[i] = 0;
    }
    __device__ void add(int32_t position) { atomicOr(&words_[position / 32], 1u << position % 32); }
    __device__ uint32_t word(uint32_t index) const { return words_[index]; }
    __device__ bool has(int32_t position) const { return words_[position / 32] >> position % 32 & 1; }

  private:
    uint32_t* const words_;
};

// Memory of fixed size. Ranks [max_blocks] and two sets of positions follow it in dynamic shared memory.
struct SelectionMemory {
    SelectMemory select;
    int32_t slots[most_slots];         // position of the block in each slot
    int32_t chosen[most_selected];     // positions of selected candidates, or of those that may be misses, ascending
    alignas(16) float scores[select_threads];  // of place_by_score: score of each thread
    int32_t free_slots[most_slots];    // in the order in which to overwrite them
    uint32_t plan_first;
    uint32_t unused[3];
};

// Return how many of the entries that count come before this thread's entry, ordered by score (ascending or descending) and
// then by thread; 0 if this thread's entry does not count. Only the first `end` threads may have an entry that counts, and no
// score is NaN. Called by a whole CTA.
template <bool kAscending>
__device__ uint32_t place_by_score(SelectionMemory& memory, bool counts, float score, uint32_t end) {
    __syncthreads();
    memory.scores[threadIdx.x] = counts ? score : __uint_as_float(0x7FFFFFFF);  // NaN: neither before nor equal to any score
    __syncthreads();
    uint32_t before = 0;
    if (counts) {
        const auto* const quads = reinterpret_cast<const float4*>(memory.scores);
        for (uint32_t quad = 0; quad < (end + 3) / 4; ++quad) {
            const float4 four = quads[quad];
            const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const bool better = kAscending ? others[i] < score : others[i] > score;
                before += better || (others[i] == score && quad * 4 + i < threadIdx.x);
            }
        }
    }
    return before;
}

// A block that was selected or is always attended; each thread has one. The tail is not among these blocks: it has a slot, and
// is attended there.
struct Entry {
    int32_t position;  // -1: this thread has none
    bool is_candidate;
    bool has_slot;
    bool in_pool;
    float score;
    int32_t page;
};

}  // namespace sglang_hybrid::cuda
