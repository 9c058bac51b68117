// Selection: which blocks of each (row, KV head) are attended, which of them are misses, and which become resident.
// `select_blocks` and `blocks_worth` of the reference, used as policy `scout` uses them.
#pragma once

#include "sglang_hybrid/cuda/near_bias.cuh"
#include "sglang_hybrid/cuda/slot_plans.cuh"

namespace sglang_hybrid::cuda {

__device__ inline bool is_due(const sh_select_blocks& args, uint32_t entry, int32_t row, int32_t length) {
    if (args.due && args.due[entry]) return true;
    if (!args.interval || *args.interval <= 0) return false;
    const int32_t steps = length - args.first_lengths[row] + 1;
    if (steps <= static_cast<int32_t>(args.early)) return true;
    return static_cast<uint32_t>(steps + static_cast<int32_t>(args.layer)) % *args.interval == 0;
}

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

// Return a number in [0, 1), spread evenly over rows, heads and lengths: added before rounding down, it rounds a fraction f of
// a block up in a share f of the cases.
__device__ inline float rounding_phase(uint32_t row, uint32_t head, uint32_t length) {
    uint32_t bits = (row * 0x9E3779B1u) ^ (head * 0x85EBCA77u) ^ (length * 0xC2B2AE3Du);
    bits = (bits ^ bits >> 15) * 0x2C1B3C6Du;
    bits = (bits ^ bits >> 12) * 0x297A2D39u;
    return static_cast<float>((bits ^ bits >> 15) >> 8) * 0x1p-24f;
}

// Return how many of `misses` are gathered, if there are slots for all of them.
__device__ inline uint32_t gathered_of(const sh_select_blocks& args, uint32_t misses, float phase) {
    // memory may hold anything: NaN and negative numbers count as 0
    const float share = fminf(fmaxf(*args.gather_share, 0.0f), 1.0f);
    const uint32_t room = min(args.most_gathered, misses);
    // product and sum are rounded one by one, as in the tests
    const uint32_t wanted = min(static_cast<uint32_t>(__fadd_rn(__fmul_rn(static_cast<float>(misses), share), phase)), room);
    const uint32_t beyond = misses - wanted > args.most_misses ? misses - wanted - args.most_misses : 0;
    return min(wanted + beyond, room);
}

// Write a list of the entries of all threads with `is_in`, in thread order, with -1 behind the last. Called by a whole CTA.
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

// Write the candidates without a slot that score at least min_miss_score to memory.chosen, of more than `most` the best, and
// return their number. Called by a whole CTA.
__device__ inline uint32_t choose_worth(const sh_select_blocks& args, SelectionMemory& memory, const RowBlocks& row,
                                        const PositionSet& in_slots, const float* scores, uint32_t* ranks, uint32_t most) {
    const uint32_t candidates = static_cast<uint32_t>(row.last - row.first);
    uint32_t mine = 0, worth;
    __syncthreads();  // all threads have read memory.chosen
    for (uint32_t i = threadIdx.x; i < candidates; i += select_threads) {
        const int32_t position = row.first + static_cast<int32_t>(i);
        const bool counts = !in_slots.has(position) && or_lowest(scores[position]) >= args.min_miss_score;
        ranks[i] = counts ? rank_of(scores[position]) : 0;  // lower than the rank of any score
        mine += counts;
    }
    sum_before(mine, memory.select, worth);
    const uint32_t wanted = min(worth, most);
    if (wanted) {
        const Threshold threshold = wanted == worth ? Threshold{0, 0} : best_ranks(ranks, candidates, wanted, memory.select);
        take_best(ranks, candidates, threshold, memory.select,
                  [&](uint32_t n, uint32_t index) { memory.chosen[n] = row.first + static_cast<int32_t>(index); });
    }
    __syncthreads();
    return wanted;
}

// Write slots for gathered blocks to memory.free_slots, and return their number. Selected blocks (`mine` of each thread) keep
// their slots. With any_block, so do blocks that would be misses without their slots. Called by a whole CTA.
__device__ inline uint32_t find_slots_to_gather(const sh_select_blocks& args, SelectionMemory& memory, const RowBlocks& row,
                                                const Entry& mine, PositionSet selected, const float* scores) {
    selected.clear(args.step.max_blocks);
    __syncthreads();
    if (mine.position >= 0) selected.add(mine.position);
    __syncthreads();
    return find_free_slots(memory, args.table, row, selected, scores, args.any_block ? args.min_miss_score : INFINITY);
}

// Add `blocks`, which the whole CTA found together, to a total. Called by a whole CTA.
__device__ inline void add_to_total(const sh_select_blocks& args, sh_select_total total, uint32_t blocks) {
    if (!args.totals || !blocks || threadIdx.x) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(&args.totals[total]), static_cast<unsigned long long>(blocks));
}

// What write_misses did.
struct Missed {
    bool gathers;  // blocks of the pair are gathered
    bool is_listed;  // this thread's block is in the first list
};

// Write the misses among `missed` of each thread to the first list or to the plan of gathered blocks: blocks without a slot
// that score at least min_miss_score. A sink or recent block without a slot is a miss whatever its score. Gathered blocks have
// slots from here on, in memory.slots and `in_slots`. A whole entry has no misses. Called by a whole CTA.
__device__ inline Missed write_misses(const sh_select_blocks& args, SelectionMemory& memory, const RowBlocks& row,
                                      const Entry& mine, const Entry& missed, PositionSet in_slots, PositionSet selected,
                                      const float* scores, uint32_t pair, uint64_t first_slot, float phase) {
    const bool worth = !missed.is_candidate || missed.score >= args.min_miss_score;
    const bool is_whole = args.whole && args.whole[pair / args.kv_heads];
    const bool is_miss = missed.position >= 0 && !missed.has_slot && missed.in_pool && worth && !is_whole;
    const bool is_sink = missed.position < row.first;
    const auto misses = static_cast<uint32_t>(__syncthreads_count(is_miss));
    add_to_total(args, sh_total_misses, misses);
    uint32_t gathered = args.gather_share ? gathered_of(args, misses, phase) : 0, sinks = 0;
    if (gathered) {
        sinks = static_cast<uint32_t>(__syncthreads_count(is_miss && is_sink));  // they come first, and have slots of their own
        gathered = min(gathered, sinks + find_slots_to_gather(args, memory, row, mine, selected, scores));
    }
    uint32_t better = gathered;  // number of better misses; if all misses are in one list, it does not matter
    if (gathered || misses > args.most_misses) better = place_by_score<false>(memory, is_miss, missed.score, args.budget);
    const bool is_listed = is_miss && better >= gathered && better - gathered < args.most_misses;
    write_list(memory, is_listed, missed, pair, args.most_misses, args.miss_pages, args.miss_positions, args.miss_counts);
    if (!gathered) return {false, is_listed};

    const bool is_gathered = is_miss && better < gathered;
    int32_t slot = 0;
    if (is_gathered) slot = is_sink ? missed.position : memory.free_slots[better - sinks];
    add_to_plan(args.gathered, memory, is_gathered, missed, first_slot + static_cast<uint32_t>(slot));
    if (is_gathered) {
        memory.slots[slot] = missed.position;
        in_slots.add(missed.position);
    }
    __syncthreads();
    return {true, is_listed};
}

// Write the plan: the best of the selected candidates become resident, as many as there are slots. Candidates with a slot keep
// it. The others get empty slots, then those of blocks that were not selected, lowest score first. Blocks that are not
// overwritten stay. Called by a whole CTA.
__device__ inline void write_plan(const sh_select_blocks& args, SelectionMemory& memory, const RowBlocks& row,
                                  const Entry& entry, PositionSet recalled, const float* scores, uint32_t chosen,
                                  uint64_t first_slot) {
    const sh_slot_table& table = args.table;
    const uint32_t always = table.sink + table.recent + 1, room = table.slots > always ? table.slots - always : 0;
    bool stays = entry.position >= 0 && entry.is_candidate && entry.in_pool;
    if (chosen > room) {
        const uint32_t better = place_by_score<false>(memory, stays, entry.score, args.budget);
        stays = stays && better < room;
    }
    if (stays) recalled.add(entry.position);
    __syncthreads();
    const uint32_t free_slots = find_free_slots(memory, table, row, recalled, scores, INFINITY);

    const bool is_sink = entry.position < row.first;
    const bool is_new = entry.position >= 0 && entry.in_pool && !entry.has_slot && (stays || !entry.is_candidate);
    uint32_t fresh;
    const uint32_t which = sum_before(is_new && !is_sink, memory.select, fresh);
    const bool has_place = is_sink || which < free_slots;
    int32_t slot = 0;
    if (is_new && has_place) slot = is_sink ? entry.position : memory.free_slots[which];
    add_to_plan(args.plan, memory, is_new && has_place, entry, first_slot + static_cast<uint32_t>(slot));
}

// Write which slots are attended: those with a selected block, and that of the tail, which always is. Called by a whole CTA.
__device__ inline void write_attended(const sh_select_blocks& args, const SelectionMemory& memory, const RowBlocks& row,
                                      const Entry& mine, PositionSet selected, uint64_t first_slot) {
    if (!args.attended) return;
    __syncthreads();
    selected.clear(args.step.max_blocks);
    __syncthreads();
    if (mine.position >= 0) selected.add(mine.position);
    __syncthreads();
    if (threadIdx.x >= args.table.slots) return;
    const int32_t held = memory.slots[threadIdx.x];
    const bool is_attended = held == row.tail() || (held >= 0 && held < row.count && selected.has(held));
    args.attended[first_slot + threadIdx.x] = is_attended ? held : -1;
}

// Select blocks for one (row, KV head). Return the positions of the blocks that are attended: in slots, or in the list of
// misses. Called by a whole CTA.
__device__ inline PositionSet select_of_row(const sh_select_blocks& args, SelectionMemory& memory, uint32_t* ranks,
                                            uint32_t entry, uint32_t pair, int32_t row_index) {
    const sh_slot_table& table = args.table;
    const uint32_t max_blocks = args.step.max_blocks;
    const int32_t length = args.step.lengths[entry];
    const RowBlocks row(length, table, max_blocks);
    const uint64_t of_row = uint64_t{static_cast<uint32_t>(row_index)} * args.kv_heads + pair % args.kv_heads;
    const float* const scores = args.scores + (args.scores_by_row ? of_row : pair) * max_blocks;
    const uint64_t first_slot = of_row * table.slots;
    PositionSet in_slots(ranks + max_blocks), recalled(ranks + max_blocks + PositionSet::words(max_blocks));

    in_slots.clear(max_blocks);
    recalled.clear(max_blocks);
    if (threadIdx.x < table.slots) memory.slots[threadIdx.x] = table.positions[first_slot + threadIdx.x];
    __syncthreads();
    // A tail that this step opens gets its slot now. A tail that has none for another reason (the row's slots were never
    // filled) gets the same slot from `append`, which also loads its earlier tokens; no other block may have that slot. The
    // slot is the first empty one then, also for an `append` that finds other slots filled by the gather meanwhile.
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
    Entry mine = entry_of(args, memory, row, in_slots, scores, pages, chosen), missed = mine;
    if (args.any_block) {
        const uint32_t worth = choose_worth(args, memory, row, in_slots, scores, ranks, most);
        missed = entry_of(args, memory, row, in_slots, scores, pages, worth);
    }
    const float phase = rounding_phase(static_cast<uint32_t>(row_index), pair % args.kv_heads, static_cast<uint32_t>(length));
    const PositionSet selected(ranks);  // the ranks are no longer needed
    Missed found{false, false};
    if (args.miss_counts) {
        if (args.totals) {
            add_to_total(args, sh_total_selected, chosen);
            const bool is_resident = mine.position >= 0 && mine.is_candidate && mine.has_slot;
            add_to_total(args, sh_total_resident, static_cast<uint32_t>(__syncthreads_count(is_resident)));
        }
        found = write_misses(args, memory, row, mine, missed, in_slots, selected, scores, pair, first_slot, phase);
    }
    const auto [gathers, is_listed] = found;
    if (args.recalls && threadIdx.x == 0 && pair % args.kv_heads == 0) {
        args.recalls[entry] = is_due(args, entry, row_index, length);
    }
    if (args.plan.count && is_due(args, entry, row_index, length)) {
        // the plan is made for the slots as they are when the gathered blocks are there
        if (gathers && mine.position >= 0) mine.has_slot = in_slots.has(mine.position);
        write_plan(args, memory, row, mine, recalled, scores, chosen, first_slot);
    }
    write_attended(args, memory, row, mine, selected, first_slot);
    // the set is built anew: gathered blocks have taken the slots of others
    __syncthreads();
    in_slots.clear(max_blocks);
    __syncthreads();
    if (threadIdx.x < table.slots) {
        const int32_t held = memory.slots[threadIdx.x];
        if (held >= 0 && held < row.count) in_slots.add(held);
    }
    if (is_listed) in_slots.add(missed.position);
    __syncthreads();
    return in_slots;
}

// Write which blocks are in slots, for a whole entry. Called by a whole CTA.
__device__ inline void write_held(const sh_select_blocks& args, uint32_t entry, uint32_t pair, const PositionSet& in_slots) {
    if (!args.held || !args.whole || !args.whole[entry]) return;
    const uint32_t words = PositionSet::words(args.step.max_blocks);
    for (uint32_t i = threadIdx.x; i < words; i += select_threads) args.held[uint64_t{pair} * words + i] = in_slots.word(i);
}

// Write the pending scores of a pair. Called by a whole CTA.
template <int kTiles>
__device__ void write_scores(const sh_score_blocks& args, uint32_t entry, uint32_t pair, char* shared) {
    static_assert(select_threads == finish_threads && sizeof(FinishScratch<kTiles>) <= sizeof(SelectionMemory));
    if (has_scores(args, entry)) finish_pair(args, entry, pair, *reinterpret_cast<FinishScratch<kTiles>*>(shared));
    __syncthreads();
}

// A CTA for each (batch entry, KV head), four or five of them on a processor: 77 rows with 8 KV heads run at once.
template <int kTiles>
__global__ void __launch_bounds__(select_threads, kTiles == 1 ? 5 : 4)
    select_blocks(const __grid_constant__ sh_select_blocks args) {
    extern __shared__ __align__(16) char shared[];
    auto& memory = *reinterpret_cast<SelectionMemory*>(shared);
    const uint32_t pair = blockIdx.x, entry = pair / args.kv_heads;
    const bool is_active = entry < active_of(args.step.active_rows, args.step.batch);
    if (is_active && !(args.scored.only && !args.scored.only[entry])) {
        const int32_t row = args.step.row_of[entry];
        if (row_exists(row, args.table) && args.step.lengths[entry] > 0) {
            if (args.scored.estimates) write_scores<kTiles>(args.scored, entry, pair, shared);
            const PositionSet attended =
                select_of_row(args, memory, reinterpret_cast<uint32_t*>(shared + sizeof(SelectionMemory)), entry, pair, row);
            write_held(args, entry, pair, attended);
            if (args.near_bias && args.scored.estimates) {
                const RowBlocks blocks(args.step.lengths[entry], args.table, args.step.max_blocks);
                write_bias<kTiles>(args, entry, pair, blocks, attended, shared);
            }
        } else {
            if (args.miss_counts) {
                write_list(memory, false, Entry{}, pair, args.most_misses, args.miss_pages, args.miss_positions,
                           args.miss_counts);
            }
            if (args.recalls && threadIdx.x == 0) args.recalls[entry] = 0;
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    // only the last CTA adds to the totals of plans, without atomics: launches of a layer follow each other
    if (args.gather_share) {
        const uint32_t gathered = finish_plan(args.gathered);
        if (args.totals && gathered) args.totals[sh_total_gathered] += gathered;
    }
    if (!args.plan.count) return;
    const uint32_t entries = finish_plan(args.plan);
    if (args.totals && entries) args.totals[sh_total_recalled] += entries;
}

}  // namespace sglang_hybrid::cuda
