// Selection: which blocks of each (row, KV head) deserve attention, which blocks are misses, and what becomes resident.
// `select_blocks` and `blocks_worth` of the reference and what policy `scout` makes of them.
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
    int32_t chosen[most_selected];     // candidates that were selected, or are worth it, ascending
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
    if (args.due && args.due[entry]) return true;
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
    const uint32_t entries = atomicExch(&args.plan.progress[0], 0u);
    *args.plan.count = static_cast<int32_t>(entries);
    args.plan.progress[1] = 0;
    if (args.totals) args.totals[1] += entries;  // the only one: launches of a layer follow each other
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

// From [0, 1), spread evenly over rows, heads and lengths: what a share leaves of a block is rounded up as often as it says.
__device__ inline float rounding_phase(uint32_t row, uint32_t head, uint32_t length) {
    uint32_t bits = (row * 0x9E3779B1u) ^ (head * 0x85EBCA77u) ^ (length * 0xC2B2AE3Du);
    bits = (bits ^ bits >> 15) * 0x2C1B3C6Du;
    bits = (bits ^ bits >> 12) * 0x297A2D39u;
    return static_cast<float>((bits ^ bits >> 15) >> 8) * 0x1p-24f;
}

// How many of `misses` are gathered.
__device__ inline uint32_t gathered_of(const sh_select_blocks& args, uint32_t misses, float phase) {
    // whatever is in memory: NaN and negative numbers are no share at all
    const float share = fminf(fmaxf(*args.gather_share, 0.0f), 1.0f);
    const uint32_t room = min(args.most_gathered, misses);
    // rounded one by one, as the tests do it
    const uint32_t wanted = min(static_cast<uint32_t>(__fadd_rn(__fmul_rn(static_cast<float>(misses), share), phase)), room);
    const uint32_t beyond = misses - wanted > args.most_misses ? misses - wanted - args.most_misses : 0;
    return min(wanted + beyond, room);
}

// By a whole CTA: a list of those that are in it, in the order of their threads, -1 behind the last.
__device__ inline void write_list(SelectionMemory& memory, bool is_in, const Entry& entry, uint32_t pair, uint32_t most,
                                  int32_t* pages, int32_t* positions, int32_t* counts) {
    uint32_t count;
    const uint32_t place = sum_before(is_in, memory.select, count);
    const uint64_t list = uint64_t{pair} * most;
    if (is_in) {
        pages[list + place] = entry.page;
        positions[list + place] = entry.position;
    }
    for (uint32_t i = count + threadIdx.x; i < most; i += select_threads) {
        pages[list + i] = -1;
        positions[list + i] = -1;
    }
    if (threadIdx.x == 0) counts[pair] = static_cast<int32_t>(count);
}

// By a whole CTA: the candidates that are worth it and in no slot to memory.chosen, of more than `most` the best; how many.
__device__ inline uint32_t choose_worth(const sh_select_blocks& args, SelectionMemory& memory, const RowBlocks& row,
                                        const PositionSet& in_slots, const float* scores, uint32_t* ranks, uint32_t most) {
    const uint32_t candidates = static_cast<uint32_t>(row.last - row.first);
    uint32_t mine = 0, worth;
    __syncthreads();  // everybody has taken what is in memory.chosen
    for (uint32_t i = threadIdx.x; i < candidates; i += select_threads) {
        const int32_t position = row.first + static_cast<int32_t>(i);
        const bool counts = !in_slots.has(position) && or_lowest(scores[position]) >= args.worth;
        ranks[i] = counts ? rank_of(scores[position]) : 0;  // below that of any score
        mine += counts;
    }
    sum_before(mine, memory.select, worth);
    const uint32_t wanted = min(worth, most);
    if (wanted) {
        const Threshold threshold =
            wanted == worth ? Threshold{0, 0} : best_ranks(ranks, candidates, wanted, memory.select);
        take_best(ranks, candidates, threshold, memory.select,
                  [&](uint32_t n, uint32_t index) { memory.chosen[n] = row.first + static_cast<int32_t>(index); });
    }
    __syncthreads();
    return wanted;
}

// Selected, not in a slot, and worth it. A block that is always in and has no slot is a miss whatever its score.
__device__ inline void write_misses(const sh_select_blocks& args, SelectionMemory& memory, const Entry& entry, uint32_t pair,
                                    float phase) {
    const bool worth = !entry.is_candidate || entry.score >= args.worth;
    const bool is_miss = entry.position >= 0 && !entry.has_slot && entry.in_pool && worth;
    const auto misses = static_cast<uint32_t>(__syncthreads_count(is_miss));
    if (args.totals && misses && threadIdx.x == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(args.totals), static_cast<unsigned long long>(misses));
    }
    const uint32_t gathered = args.gather_share ? gathered_of(args, misses, phase) : 0;
    uint32_t better = gathered;  // of the other misses; where all of them are in one list it does not matter
    if (gathered || misses > args.most_misses) better = place_by_score<false>(memory, is_miss, entry.score);
    const bool is_listed = is_miss && better >= gathered && better - gathered < args.most_misses;
    write_list(memory, is_listed, entry, pair, args.most_misses, args.miss_pages, args.miss_positions, args.miss_counts);
    if (!args.gather_share) return;
    write_list(memory, is_miss && better < gathered, entry, pair, args.most_gathered, args.gathered_pages,
               args.gathered_positions, args.gathered_counts);
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
    // The tail's slot: given now to a tail that this step opens. One that has none for another reason (a row whose slots
    // nobody filled) gets the same one from `append`, which also loads its earlier tokens; nobody else may have it.
    if (threadIdx.x < 32 && find_slot(memory.slots, table, row.tail()) < 0) {
        const int32_t slot = slot_for_tail(memory.slots, table, row, scores);
        __syncwarp();
        if (slot >= 0 && threadIdx.x == 0) {
            memory.slots[slot] = row.tail();
            if (length % 32 == 1) table.positions[first_slot + slot] = row.tail();
        }
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
    const uint32_t most = args.budget > forced ? args.budget - forced : 0, chosen = min(candidates, most);
    if (chosen) {
        const Threshold threshold =
            chosen == candidates ? Threshold{0, 0} : best_ranks(ranks, candidates, chosen, memory.select);
        take_best(ranks, candidates, threshold, memory.select,
                  [&](uint32_t n, uint32_t index) { memory.chosen[n] = row.first + static_cast<int32_t>(index); });
    }
    const int32_t* const pages = args.step.page_table + uint64_t{entry} * max_blocks;
    const Entry mine = entry_of(args, memory, row, in_slots, scores, pages, chosen);
    const float phase = rounding_phase(static_cast<uint32_t>(row_index), pair % args.kv_heads, static_cast<uint32_t>(length));
    if (args.any_block) {
        const uint32_t worth = choose_worth(args, memory, row, in_slots, scores, ranks, most);
        write_misses(args, memory, entry_of(args, memory, row, in_slots, scores, pages, worth), pair, phase);
    } else {
        write_misses(args, memory, mine, pair, phase);
    }
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
            write_misses(args, memory, Entry{-1, false, false, false, 0, -1}, pair, 0.0f);
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
