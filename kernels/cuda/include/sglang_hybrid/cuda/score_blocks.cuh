// Estimates of all blocks of a batch: `estimates` of a layer's cache. finish_scores.cuh computes scores from the estimates.
//
// The time goes into reading digests and codes. All octets (eight blocks) of all (batch entry, KV head) pairs are one long
// list, and every CTA that the device can run gets an equally long part of it, whatever the rows' lengths. A warp takes every
// n-th octet of its CTA. While a warp computes with one octet, the next is being loaded, also if it is the next pair's, and so
// is the page table of the one after the next: no warp waits for another, nor for a load that it has just begun.
#pragma once

#include "sglang_hybrid/cuda/estimates.cuh"
#include "sglang_hybrid/cuda/finish_scores.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t score_warps = 4;
inline constexpr uint32_t score_threads = score_warps * 32;
inline constexpr uint32_t most_score_entries = 1024;  // most entries of a batch: their block counts are in shared memory

template <int kDim, int kChannels, Format kFormat>
struct ScoreMemory {
    using Here = Octet<kDim, kChannels, kFormat>;
    static constexpr uint32_t stages = 2;
    static constexpr uint32_t warp_bytes = stages * Here::bytes + Here::step_bytes;
    static constexpr uint32_t octets = 0;
    static constexpr uint32_t list = score_warps * warp_bytes;  // OctetList
    static __host__ __device__ uint32_t bytes(uint32_t batch) { return list + (2 * batch + 1) * sizeof(uint32_t); }
};

// -- which octets ------------------------------------------------------------------------------------------------------

// The octets of all entries, in shared memory. An entry that is not scored has no blocks.
struct OctetList {
    uint32_t* before;  // [batch + 1]: number of octets of one KV head of all entries before an entry
    uint32_t* blocks;  // [batch]: number of blocks of an entry

    __device__ OctetList(char* shared, uint32_t batch)
        : before(reinterpret_cast<uint32_t*>(shared)), blocks(before + batch + 1) {}

    // Count the octets of `active` entries. Called by a whole CTA, of which the first warp counts.
    __device__ void count(const sh_score_blocks& args, uint32_t active) {
        if (threadIdx.x < 32) {
            uint32_t total = 0;
            for (uint32_t base = 0; base < active; base += 32) {
                const uint32_t entry = base + threadIdx.x;
                const uint32_t count = entry < active && has_scores(args, entry) ? blocks_of(args.step, entry) : 0;
                uint32_t sum = (count + octet_blocks - 1) / octet_blocks;
#pragma unroll
                for (uint32_t step = 1; step < 32; step *= 2) {
                    const uint32_t other = __shfl_up_sync(0xFFFFFFFF, sum, step);
                    if (threadIdx.x >= step) sum += other;
                }
                if (entry < active) {
                    before[entry + 1] = total + sum;
                    blocks[entry] = count;
                }
                total += __shfl_sync(0xFFFFFFFF, sum, 31);
            }
            if (threadIdx.x == 0) before[0] = 0;
        }
        __syncthreads();
    }
};

// A position in the list of octets.
class OctetCursor {
  public:
    // Begin at octet `number` of the list, which belongs to `entry`.
    __device__ OctetCursor(const OctetList& list, uint32_t heads, uint32_t entry, uint32_t number)
        : before_(list.before), heads_(heads), octets_(before_[entry + 1] - before_[entry]), entry(entry), head(0),
          octet(number - before_[entry] * heads) {
        advance(0);
    }
    // Move on by `octets`. There must be that many octets left in the list.
    __device__ void advance(uint32_t octets) {
        octet += octets;
        while (octet >= octets_) {
            octet -= octets_;
            if (++head < heads_) continue;
            head = 0;
            do {  // entries that are not scored have no octets
                ++entry;
                octets_ = before_[entry + 1] - before_[entry];
            } while (!octets_);
        }
    }

  private:
    const uint32_t* const before_;
    const uint32_t heads_;
    uint32_t octets_;  // of each pair of the entry

  public:
    uint32_t entry, head, octet;  // octet: of the pair
};

// The blocks of an octet; lane b has the b-th.
struct OctetBlocks {
    int32_t position;  // -1: there is none
    int32_t page;      // as the page table has it, which may be any number; -1 for the tail and where there is no block
    uint32_t entry, head;

    static __device__ OctetBlocks none() { return {-1, -1, 0, 0}; }
    // Begin to load the pages. They are not looked at here, so that the warp does not wait for them.
    static __device__ OctetBlocks at(const sh_score_blocks& args, const OctetList& list, const OctetCursor& cursor) {
        const uint32_t lane = threadIdx.x % 32, position = cursor.octet * octet_blocks + lane;
        const uint32_t blocks = list.blocks[cursor.entry];
        OctetBlocks found{-1, -1, cursor.entry, cursor.head};
        if (lane >= octet_blocks || position >= blocks) return found;
        found.position = static_cast<int32_t>(position);
        // the tail has no estimate: see without_tail of the reference
        if (position + 1 < blocks) {
            found.page = args.step.page_table[uint64_t{cursor.entry} * args.step.max_blocks + position];
        }
        return found;
    }
};

// -- estimates ---------------------------------------------------------------------------------------------------------

// A warp's state of the pair that it estimates: the sketch's channels, and the queries.
template <class Element, int kDim, int kChannels, Format kFormat, int kTiles>
struct ScoredPair {
    uint32_t number = UINT32_MAX;
    SketchSteps<kDim, kChannels, kFormat> sketch;
    HeadTile<Element, kDim, kChannels, kFormat> tiles[kTiles];

    __device__ void become(const sh_score_blocks& args, uint32_t pair, uint32_t head) {
        if (pair == number) return;
        number = pair;
        sketch = {args.digests, head, args.scale};
        // an entry that is scored has a row, see has_scores
        const uint64_t owner = args.query_by_row ? owner_of(args, pair / args.digests.kv_heads, pair) : pair;
#pragma unroll
        for (uint32_t tile = 0; tile < kTiles; ++tile) {
            const uint32_t first = tile * tile_heads;  // a second tile may have no head
            tiles[tile] = HeadTile<Element, kDim, kChannels, kFormat>(
                static_cast<const char*>(args.query) + (owner * args.group + first) * kDim * 2,
                args.group - min(first, args.group), args.digests, head, args.scale, args.spread);
        }
    }
};

// Estimate every n-th octet of the list, n the number of warps, from `first` to `end`; `first` belongs to `entry`. A page that
// is filled with NaN gets estimates that are lower than all others. Called by each warp.
template <class Element, int kDim, int kChannels, Format kFormat, int kTiles>
__device__ void estimate_octets(const sh_score_blocks& args, char* shared, const OctetList& list, uint32_t entry,
                                uint32_t first, uint32_t end) {
    using Memory = ScoreMemory<kDim, kChannels, kFormat>;
    using Here = Octet<kDim, kChannels, kFormat>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = args.digests.kv_heads;
    if (first + warp >= end) return;
    char* const mine = shared + warp * Memory::warp_bytes;
    char* const written = mine + Memory::stages * Here::bytes;
    const uint64_t policy = read_once_policy();

    OctetCursor ahead(list, heads, entry, first);
    ahead.advance(warp);
    uint32_t asked = first + warp;
    const auto next_blocks = [&] {  // of the octet at `ahead`, which then moves on
        if (asked >= end) return OctetBlocks::none();
        const OctetBlocks found = OctetBlocks::at(args, list, ahead);
        asked += score_warps;
        if (asked < end) ahead.advance(score_warps);
        return found;
    };
    const auto request = [&](uint32_t stage, uint32_t octet, const OctetBlocks& blocks) {
        const uint32_t to = shared_address(mine + stage * Here::bytes);
        if (octet < end) Here::request(to, args.digests, blocks.head, blocks.page, policy);
        commit_copies();  // also commits an empty group, since waiting counts groups
    };
    static_assert(Memory::stages == 2);
    OctetBlocks blocks = next_blocks();
    request(0, first + warp, blocks);
    OctetBlocks next = next_blocks();

    ScoredPair<Element, kDim, kChannels, kFormat, kTiles> pair;
    uint32_t stage = 0;
    for (uint32_t octet = first + warp; octet < end; octet += score_warps) {
        request(stage ^ 1, octet + score_warps, next);
        const OctetBlocks requested = next;
        next = next_blocks();  // its latency hides behind the computation
        pair.become(args, blocks.entry * heads + blocks.head, blocks.head);
        wait_for_copies<1>();
        __syncwarp();

        char* const here = mine + stage * Here::bytes;
        const char* const steps = Here::steps(here, written);
        if constexpr (!Here::is_compact) {
            pair.sketch.template write<Element>(here, written);
            __syncwarp();
        }
        const int32_t position = __shfl_sync(0xFFFFFFFF, blocks.position, lane / 4);
        const bool readable = has_page(args.digests, __shfl_sync(0xFFFFFFFF, blocks.page, lane / 4));
        float* const estimates = args.estimates + uint64_t{pair.number} * args.group * args.step.max_blocks;
#pragma unroll
        for (uint32_t tile = 0; tile < kTiles; ++tile) {
            const float2 found = pair.tiles[tile].estimate(shared_address(here), steps);
            const uint32_t head = tile * tile_heads + lane % 4 * 2;
            if (position >= 0) {
                float* const to = estimates + uint64_t{head} * args.step.max_blocks + position;
                if (head < args.group) to[0] = readable ? or_lowest(found.x) : -FLT_MAX;
                if (head + 1 < args.group) to[args.step.max_blocks] = readable ? or_lowest(found.y) : -FLT_MAX;
            }
            __syncwarp();  // all lanes are done with the octet and its steps; tensor cores need them together
        }
        blocks = requested;
        stage ^= 1;
    }
    wait_for_copies<0>();
    __syncwarp();
}

template <class Element, int kDim, int kChannels, Format kFormat, int kTiles>
__global__ void __launch_bounds__(score_threads, kTiles == 1 ? 4 : 2)
    score_blocks(const __grid_constant__ sh_score_blocks args) {
    using Memory = ScoreMemory<kDim, kChannels, kFormat>;
    extern __shared__ __align__(128) char shared[];
    const uint32_t heads = args.digests.kv_heads, active = active_of(args.step.active_rows, args.step.batch);
    OctetList list(shared + Memory::list, args.step.batch);
    list.count(args, active);
    const uint32_t total = active ? list.before[active] * heads : 0;
    const uint32_t share = max(score_warps, (total + gridDim.x - 1) / gridDim.x);
    const uint32_t first = min(blockIdx.x * share, total), end = min(first + share, total);
    if (first == end) return;
    uint32_t entry = 0;  // of `first`: the last entry that begins at `first` or before; this one has octets
    for (uint32_t upper = active; entry + 1 < upper;) {
        const uint32_t middle = (entry + upper) / 2;
        if (list.before[middle] * heads <= first) entry = middle;
        else upper = middle;
    }
    estimate_octets<Element, kDim, kChannels, kFormat, kTiles>(args, shared, list, entry, first, end);
}

}  // namespace sglang_hybrid::cuda
