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
    float scores[select_threads];      // of place_by_score: score of each thread
    uint32_t counted[select_threads];  // of place_by_score: whether the score counts
    int32_t free_slots[most_slots];    // in the order in which to overwrite them
    uint32_t plan_first;
    uint32_t unused[3];
};

// Return how many of the entries that count come before this thread's entry, ordered by score (ascending or descending) and
// then by thread; 0 if this thread's entry does not count. Called by a whole CTA, in which each thread has an entry or none.
template <bool kAscending>
__device__ uint32_t place_by_score(SelectionMemory& memory, bool counts, float score) {
    __syncthreads();
    memory.scores[threadIdx.x] = score;
    memory.counted[threadIdx.x] = counts;
    __syncthreads();
    uint32_t before = 0;
    if (counts) {
        for (uint32_t i = 0; i < select_threads; ++i) {
            const float other = memory.scores[i];
            const bool better = kAscending ? other < score : other > score;
            before += memory.counted[i] && (better || (other == score && i < threadIdx.x));
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
