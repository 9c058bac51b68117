// Selection: which blocks of each (row, KV head) deserve attention, which of them are misses, and what becomes resident.
// `select_blocks` of the reference and what policy `scout` makes of it.
#pragma once

#include "sglang_hybrid/cuda/best_blocks.cuh"
#include "sglang_hybrid/cuda/slot_table.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t most_selected = select_threads;  // a thread for each
inline constexpr uint32_t most_slots = select_threads;

// Positions of a row, one bit each.
class PositionSet {
  public:
    __device__ explicit PositionSet(uint32_t* words) : words_(words) {}
    static __host__ __device__ uint32_t words(uint32_t max_blocks) { return (max_blocks + 31) / 32; }
    __device__ void clear(uint32_t max_blocks) {
        for (uint32_t i = threadIdx.x; i < words(max_blocks); i += blockDim.x) words_[i] = 0;
    }
    __device__ void add(int32_t position) { atomicOr(&words_[position / 32], 1u << position % 32); }
    __device__ bool has(int32_t position) const { return words_[position / 32] >> position % 32 & 1; }

  private:
    uint32_t* const words_;
};

// What the CTA of one (row, KV head) shares. Behind it in dynamic memory: ranks [max_blocks], and two sets of positions.
struct SelectionMemory {
    SelectMemory select;
    int32_t slots[most_slots];         // positions of the blocks that they hold
    int32_t chosen[most_selected];     // candidates that were selected, ascending
    float scores[select_threads];      // that are ranked
    uint32_t counted[select_threads];  // whether they take part
    int32_t free_slots[most_slots];    // the first to overwrite first
    uint32_t plan_first;
    uint32_t unused[3];
};

// By a whole CTA, each thread with an entry or none: how many of those that count are before this one, by score
// (ascending or descending) and then by thread.
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

__device__ inline bool is_due(const sh_select_blocks& args, uint32_t entry, int32_t row, int32_t length) {
    if (args.due) return args.due[entry];
    if (!args.interval || *args.interval <= 0) return false;
    return static_cast<uint32_t>(length - args.first_lengths[row] + 1 + static_cast<int32_t>(args.layer)) % *args.interval == 0;
}

// By the CTA that finishes last: how many entries the plan has.
__device__ inline void finish_plan(const sh_select_blocks& args) {
    if (!args.plan.count) return;
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&args.plan.progress[1], 1u) != gridDim.x - 1) return;
    *args.plan.count = static_cast<int32_t>(atomicExch(&args.plan.progress[0], 0u));
    args.plan.progress[1] = 0;
}

// A block that was selected, or is always in: one for each thread. The tail is not among them: it has its slot and is
// attended there.
struct Entry {
    int32_t position;  // -1: this thread has none
    bool is_candidate;
    bool has_slot;
    bool in_pool;
    float score;
    int32_t page;
};

__device__ inline Entry entry_of(const sh_select_blocks& args, const SelectionMemory& memory, const RowBlocks& row,
                                 const PositionSet& in_slots, const float* scores, const int32_t* table, uint32_t chosen) {
    Entry entry{-1, false, false, false, INFINITY, -1};
    const uint32_t sinks = static_cast<uint32_t>(row.first), index = threadIdx.x;
    if (index < sinks) entry.position = static_cast<int32_t>(index);
    else if (index < sinks + chosen) entry.position = memory.chosen[index - sinks];
    else entry.position = row.last + static_cast<int32_t>(index - sinks - chosen);
    if (entry.position >= row.tail()) {
        entry.position = -1;
        return entry;
    }
    entry.is_candidate = row.is_candidate(entry.position);
    entry.has_slot = in_slots.has(entry.position);
    if (entry.is_candidate) entry.score = or_lowest(scores[entry.position]);
    entry.page = table[entry.position];
    entry.in_pool = entry.page >= 0 && static_cast<uint32_t>(entry.page) < args.pool_pages;
    return entry;
}

// Selected, not in a slot, and worth it. A block that is always in and has no slot is a miss whatever its score.
__device__ inline void write_misses(const sh_select_blocks& args, SelectionMemory& memory, const Entry& entry, uint32_t pair) {
    const bool worth = !entry.is_candidate || entry.score >= args.worth;
    bool is_miss = entry.position >= 0 && !entry.has_slot && entry.in_pool && worth;
    uint32_t misses;
    uint32_t place = sum_before(is_miss, memory.select, misses);
    if (misses > args.most_misses) {  // the best of them
        const uint32_t better = place_by_score<false>(memory, is_miss, entry.score);
        is_miss = is_miss && better < args.most_misses;
        place = sum_before(is_miss, memory.select, misses);
    }
    const uint64_t list = uint64_t{pair} * args.most_misses;
    if (is_miss) {
        args.miss_pages[list + place] = entry.page;
        args.miss_positions[list + place] = entry.position;
    }
    for (uint32_t i = misses + threadIdx.x; i < args.most_misses; i += select_threads) {
        args.miss_pages[list + i] = -1;
        args.miss_positions[list + i] = -1;
    }
    if (threadIdx.x == 0) args.miss_counts[pair] = static_cast<int32_t>(misses);
}

// The best candidates that were selected become resident, as many as there are slots. Those that have one keep it. The
// others get empty slots, then those of blocks that were not selected, lowest score first; who is not overwritten stays.
__device__ inline void write_plan(const sh_select_blocks& args, SelectionMemory& memory, const RowBlocks& row,
                                  const Entry& entry, PositionSet recalled, const float* scores, uint32_t chosen,
                                  uint64_t first_slot) {
    const sh_slot_table& table = args.table;
    const uint32_t always = table.sink + table.recent + 1, room = table.slots > always ? table.slots - always : 0;
    bool stays = entry.position >= 0 && entry.is_candidate && entry.in_pool;
    if (chosen > room) {
        const uint32_t better = place_by_score<false>(memory, stays, entry.score);
        stays = stays && better < room;
    }
    if (stays) recalled.add(entry.position);
    __syncthreads();

    const uint32_t slot = threadIdx.x;
    bool is_free = slot >= table.sink && slot < table.slots;
    float score = -INFINITY;
    if (is_free) {
        const int32_t held = memory.slots[slot];
        const bool is_candidate = row.is_candidate(held);
        is_free = !row.is_near(held) && !(is_candidate && recalled.has(held));
        if (is_free && is_candidate) score = or_lowest(scores[held]);
    }
    const uint32_t turn = place_by_score<true>(memory, is_free, score);
    if (is_free) memory.free_slots[turn] = static_cast<int32_t>(slot);
    const uint32_t free_slots = __syncthreads_count(is_free);

    const bool is_sink = entry.position >= 0 && entry.position < row.first;
    const bool is_new = entry.position >= 0 && entry.in_pool && !entry.has_slot && (stays || !entry.is_candidate);
    uint32_t planned, fresh;
    const uint32_t which = sum_before(is_new && !is_sink, memory.select, fresh);
    const bool has_place = is_sink || which < free_slots;
    const uint32_t place = sum_before(is_new && has_place, memory.select, planned);
    if (threadIdx.x == 0) memory.plan_first = planned ? atomicAdd(&args.plan.progress[0], planned) : 0;
    __syncthreads();
    const uint64_t at = uint64_t{memory.plan_first} + place;
    if (!is_new || !has_place || at >= args.plan.capacity) return;
    args.plan.pages[at] = entry.page;
    args.plan.positions[at] = entry.position;
    args.plan.destinations[at] = static_cast<int32_t>(first_slot + (is_sink ? entry.position : memory.free_slots[which]));
}

__device__ inline void select_of_row(const sh_select_blocks& args, SelectionMemory& memory, uint32_t* ranks, uint32_t entry,
                                     uint32_t pair, int32_t row_index) {
    const sh_slot_table& table = args.table;
    const uint32_t max_blocks = args.step.max_blocks;
    const int32_t length = args.step.lengths[entry];
    const RowBlocks row(length, table, max_blocks);
    const float* const scores = args.scores + uint64_t{pair} * max_blocks;
    const uint64_t first_slot = (uint64_t{static_cast<uint32_t>(row_index)} * args.kv_heads + pair % args.kv_heads) * table.slots;
    PositionSet in_slots(ranks + max_blocks), recalled(ranks + max_blocks + PositionSet::words(max_blocks));

    in_slots.clear(max_blocks);
    recalled.clear(max_blocks);
    if (threadIdx.x < table.slots) memory.slots[threadIdx.x] = table.positions[first_slot + threadIdx.x];
    __syncthreads();
    if (length % 32 == 1 && threadIdx.x < 32) {  // opens a block
        int32_t slot = find_slot(memory.slots, table, row.tail());
        if (slot < 0) slot = slot_for_tail(memory.slots, table, row, scores);
        __syncwarp();
        if (slot >= 0 && threadIdx.x == 0) memory.slots[slot] = table.positions[first_slot + slot] = row.tail();
    }
    __syncthreads();
    if (threadIdx.x < table.slots) {
        const int32_t held = memory.slots[threadIdx.x];
        if (held >= 0 && held < row.count) in_slots.add(held);
    }
    __syncthreads();

    const uint32_t candidates = static_cast<uint32_t>(row.last - row.first), forced = row.count - candidates;
    for (uint32_t i = threadIdx.x; i < candidates; i += select_threads) {
        const int32_t position = row.first + static_cast<int32_t>(i);
        ranks[i] = rank_of(scores[position] + (in_slots.has(position) ? args.bonus : 0.0f));
    }
    __syncthreads();
    const uint32_t chosen = min(candidates, args.budget > forced ? args.budget - forced : 0);
    if (chosen) {
        const Threshold threshold =
            chosen == candidates ? Threshold{0, 0} : best_ranks(ranks, candidates, chosen, memory.select);
        take_best(ranks, candidates, threshold, memory.select,
                  [&](uint32_t n, uint32_t index) { memory.chosen[n] = row.first + static_cast<int32_t>(index); });
    }
    const int32_t* const pages = args.step.page_table + uint64_t{entry} * max_blocks;
    const Entry mine = entry_of(args, memory, row, in_slots, scores, pages, chosen);
    write_misses(args, memory, mine, pair);
    if (args.plan.count && is_due(args, entry, row_index, length)) {
        write_plan(args, memory, row, mine, recalled, scores, chosen, first_slot);
    }
}

// A CTA for each (batch entry, KV head).
__global__ void __launch_bounds__(select_threads) select_blocks(const __grid_constant__ sh_select_blocks args) {
    extern __shared__ __align__(16) char shared[];
    auto& memory = *reinterpret_cast<SelectionMemory*>(shared);
    const uint32_t pair = blockIdx.x, entry = pair / args.kv_heads;
    if (entry < active_of(args.step.active_rows, args.step.batch)) {
        const int32_t row = args.step.row_of[entry];
        if (row_exists(row, args.table) && args.step.lengths[entry] > 0) {
            select_of_row(args, memory, reinterpret_cast<uint32_t*>(shared + sizeof(SelectionMemory)), entry, pair, row);
        } else {
            write_misses(args, memory, Entry{-1, false, false, false, 0, -1}, pair);
        }
    }
    finish_plan(args);
}

// After the blocks of a plan were copied: slots get their new positions.
__global__ void __launch_bounds__(select_threads) apply_plan(const __grid_constant__ sh_apply_plan args) {
    const int32_t count = *args.plan.count;
    const uint64_t entries = count < 0 ? 0 : min(static_cast<uint64_t>(count), args.plan.capacity);
    const uint64_t step = uint64_t{gridDim.x} * select_threads;
    for (uint64_t i = uint64_t{blockIdx.x} * select_threads + threadIdx.x; i < entries; i += step) {
        const int32_t slot = args.plan.destinations[i];
        if (slot >= 0 && static_cast<uint64_t>(slot) < args.slots) args.positions[slot] = args.plan.positions[i];
    }
}

}  // namespace sglang_hybrid::cuda
