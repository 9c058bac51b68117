// Scores of all blocks of a batch: `estimates` of a layer's cache and `block_scores` of the reference.
//
// Reading digests and codes is what takes time. All octets of all (batch entry, KV head) pairs are one long list, and
// every CTA that the device can run gets an equally long part of it, whatever the rows' lengths. A warp takes every n-th
// octet of its CTA; while it computes with one, the next is under way.
//
// A score is a share of the whole row, so the CTA that finishes a pair's last octet turns its estimates into scores.
#pragma once

#include "sglang_hybrid/cuda/estimates.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t score_warps = 4;
inline constexpr uint32_t score_threads = score_warps * 32;
inline constexpr uint32_t most_score_entries = 1024;  // of a batch: their octet counts are in shared memory

template <int kDim, int kChannels, Format kFormat>
struct ScoreMemory {
    using Here = Octet<kDim, kChannels, kFormat>;
    // enough on its way to fill the memory's pipeline: octets of fewer bytes are more in number
    static constexpr uint32_t stages = Here::bytes > 5000 ? 2 : 3;
    static constexpr uint32_t warp_bytes = stages * Here::bytes + Here::step_bytes;
    static constexpr uint32_t octets = 0;
    static constexpr uint32_t before = score_warps * warp_bytes;  // [batch + 1], then two words
    static __host__ __device__ uint32_t bytes(uint32_t batch) { return before + (batch + 3) * sizeof(uint32_t); }
};

// -- which octets ------------------------------------------------------------------------------------------------------

__device__ inline uint32_t blocks_of(const sh_step& step, uint32_t entry) {
    return min(static_cast<uint32_t>(max(step.lengths[entry], 0) + 31) / 32, step.max_blocks);
}

__device__ inline bool row_has_scores(const sh_score_blocks& args, int32_t row) {
    return row >= 0 && static_cast<uint32_t>(row) < args.by_row;
}

// Whether an entry is scored in this step. Steps are counted from each row's first one, as for recalls.
__device__ inline bool is_scored(const sh_score_blocks& args, uint32_t entry) {
    if (args.by_row && !row_has_scores(args, args.step.row_of[entry])) return false;
    if (args.interval <= 1 || (args.due && args.due[entry])) return true;
    const int32_t first = args.first_lengths[args.step.row_of[entry]];
    if (first < 0) return true;
    return static_cast<uint32_t>(args.step.lengths[entry] - first + 1 + static_cast<int32_t>(args.layer)) % args.interval == 0;
}

// Octets of one KV head of an entry that is scored, at least one so that somebody finishes the pair.
__device__ inline uint32_t octets_of(const sh_score_blocks& args, uint32_t entry) {
    if (!is_scored(args, entry)) return 0;
    uint32_t blocks = blocks_of(args.step, entry);
    if (args.listed) blocks = min(blocks, args.most_listed);
    return max((blocks + octet_blocks - 1) / octet_blocks, 1u);
}

// By the first warp: before[e] = octets of one KV head of all entries before e, up to e = active.
__device__ inline void count_octets(const sh_score_blocks& args, uint32_t active, uint32_t* before) {
    if (threadIdx.x < 32) {
        uint32_t total = 0;
        for (uint32_t base = 0; base < active; base += 32) {
            const uint32_t entry = base + threadIdx.x;
            uint32_t sum = entry < active ? octets_of(args, entry) : 0;
#pragma unroll
            for (uint32_t step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(0xFFFFFFFF, sum, step);
                if (threadIdx.x >= step) sum += other;
            }
            if (entry < active) before[entry + 1] = total + sum;
            total += __shfl_sync(0xFFFFFFFF, sum, 31);
        }
        if (threadIdx.x == 0) before[0] = 0;
    }
    __syncthreads();
}

// The blocks of a pair as octets: all of them, or those that are listed. Lane b knows the b-th of an octet.
class PairBlocks {
  public:
    struct Block {
        int32_t position, page;  // -1: there is none
    };

    __device__ PairBlocks(const sh_score_blocks& args, uint32_t entry, uint32_t pair)
        : args_(args), table_(args.step.page_table + uint64_t{entry} * args.step.max_blocks),
          list_(args.listed ? args.listed + uint64_t{pair} * args.most_listed : nullptr),
          blocks_(static_cast<int32_t>(blocks_of(args.step, entry))),
          listed_(list_ ? min(static_cast<uint32_t>(max(args.list_counts[pair], 0)), args.most_listed) : blocks_) {}

    __device__ Block operator[](uint32_t octet) const {
        const uint32_t lane = threadIdx.x % 32, index = octet * octet_blocks + lane;
        if (lane >= octet_blocks || index >= listed_) return {-1, -1};
        const int32_t position = list_ ? list_[index] : static_cast<int32_t>(index);
        if (position < 0 || position >= blocks_) return {-1, -1};
        const int32_t page = table_[position];
        return {position, page >= 0 && static_cast<uint32_t>(page) < args_.digests.pages ? page : -1};
    }

  private:
    const sh_score_blocks& args_;
    const int32_t* const table_;
    const int32_t* const list_;
    const int32_t blocks_;
    const uint32_t listed_;
};

// -- estimates ---------------------------------------------------------------------------------------------------------

// By each warp: every n-th octet from `first` to `end` of a pair. A page that somebody filled with NaN has estimates that
// are lower than all others.
template <class Element, int kDim, int kChannels, Format kFormat, int kTiles>
__device__ void estimate_octets(const sh_score_blocks& args, char* shared, uint32_t entry, uint32_t pair, uint32_t first,
                                uint32_t end) {
    using Memory = ScoreMemory<kDim, kChannels, kFormat>;
    using Here = Octet<kDim, kChannels, kFormat>;
    using Tile = HeadTile<Element, kDim, kChannels, kFormat>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = pair % args.digests.kv_heads;
    char* const mine = shared + warp * Memory::warp_bytes;
    char* const written = mine + Memory::stages * Here::bytes;
    const uint64_t policy = read_once_policy();
    const PairBlocks blocks(args, entry, pair);

    const auto block_of = [&](uint32_t octet) {
        return octet < end ? blocks[octet] : PairBlocks::Block{-1, -1};
    };
    const auto request = [&](uint32_t stage, uint32_t octet, int32_t page) {
        if (octet < end) Here::request(shared_address(mine + stage * Here::bytes), args.digests, head, page, policy);
        commit_copies();  // an empty group too: waiting counts groups
    };
    PairBlocks::Block block[Memory::stages];
#pragma unroll
    for (uint32_t i = 0; i + 1 < Memory::stages; ++i) {
        block[i] = block_of(first + warp + i * score_warps);
        request(i, first + warp + i * score_warps, block[i].page);
    }
    PairBlocks::Block next = block_of(first + warp + (Memory::stages - 1) * score_warps);

    const auto* const query = static_cast<const char*>(args.query) + uint64_t{pair} * args.group * kDim * 2;
    const SketchSteps<kDim, kChannels, kFormat> sketch(args.digests, head, args.scale);
    const Tile low(query, args.group, args.digests, head, args.scale, args.spread);
    const uint32_t behind = args.group > tile_heads ? args.group - tile_heads : 0;
    const Tile high(query + (kTiles > 1 && behind ? tile_heads * kDim * 2 : 0), behind, args.digests, head, args.scale,
                    args.spread);
    float* const estimates = args.estimates + uint64_t{pair} * args.group * args.step.max_blocks;

    uint32_t stage = 0, free_stage = Memory::stages - 1;
    for (uint32_t octet = first + warp; octet < end; octet += score_warps) {
        const uint32_t ahead = octet + (Memory::stages - 1) * score_warps;
        request(free_stage, ahead, next.page);
        const PairBlocks::Block requested = next;
        next = block_of(ahead + score_warps);  // its latency hides behind the computation
        wait_for_copies<Memory::stages - 1>();
        __syncwarp();

        char* const here = mine + stage * Here::bytes;
        const char* const steps = Here::steps(here, written);
        if constexpr (!Here::is_compact) {
            sketch.template write<Element>(here, written);
            __syncwarp();
        }
        const int32_t position = __shfl_sync(0xFFFFFFFF, block[0].position, lane / 4);
        const bool readable = __shfl_sync(0xFFFFFFFF, block[0].page, lane / 4) >= 0;
        const auto store = [&](const float2& found, uint32_t first_head) {
            const uint32_t at = first_head + lane % 4 * 2;
            if (position < 0) return;
            float* const to = estimates + uint64_t{at} * args.step.max_blocks + position;
            if (at < args.group) to[0] = readable ? or_lowest(found.x) : -FLT_MAX;
            if (at + 1 < args.group) to[args.step.max_blocks] = readable ? or_lowest(found.y) : -FLT_MAX;
        };
        store(low.estimate(shared_address(here), steps), 0);
        __syncwarp();  // all lanes are through with the octet and its steps; tensor cores want them together
        if constexpr (kTiles > 1) {
            store(high.estimate(shared_address(here), steps), tile_heads);
            __syncwarp();
        }

#pragma unroll
        for (uint32_t i = 0; i + 2 < Memory::stages; ++i) block[i] = block[i + 1];
        block[Memory::stages - 2] = requested;
        free_stage = stage;
        stage = stage + 1 == Memory::stages ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncwarp();
}

// -- scores ------------------------------------------------------------------------------------------------------------

// By a whole CTA: the estimates of a pair, some of which other CTAs wrote, become scores. Nothing else is read meanwhile, so
// a thread asks for several blocks at once.
template <int kTiles>
__device__ void finish_pair(const sh_score_blocks& args, uint32_t entry, uint32_t pair, float* scratch) {
    constexpr uint32_t most = kTiles * tile_heads;
    const uint32_t count = blocks_of(args.step, entry), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t max_blocks = args.step.max_blocks;
    const float* const estimates = args.estimates + uint64_t{pair} * args.group * max_blocks;
    constexpr uint32_t at_once = 4;
    float found[most][at_once];  // of blocks first, first + score_threads, ...; -inf behind the last
    const auto load = [&](uint32_t first) {
#pragma unroll
        for (uint32_t head = 0; head < most; ++head) {
#pragma unroll
            for (uint32_t i = 0; i < at_once; ++i) {
                const uint32_t block = first + i * score_threads;
                const bool is_there = head < args.group && block < count;
                found[head][i] = is_there ? __ldcg(estimates + head * max_blocks + block) : -INFINITY;
            }
        }
    };
    Mass row[most];
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) row[head] = Mass::none();
    for (uint32_t first = threadIdx.x; first < count; first += at_once * score_threads) {
        load(first);
#pragma unroll
        for (uint32_t head = 0; head < most; ++head) row[head].add(found[head]);
    }
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) {
#pragma unroll
        for (uint32_t step = 16; step; step /= 2) row[head] = row[head].with_any(row[head].from_lane(step));
        if (lane == 0) reinterpret_cast<Mass*>(scratch)[warp * most + head] = row[head];
    }
    __syncthreads();
    float highest_of[most], rest_of[most];  // together the logarithm of the row's mass
#pragma unroll
    for (uint32_t head = 0; head < most; ++head) {
        Mass all = Mass::none();
        for (uint32_t i = 0; i < score_warps; ++i) all = all.with_any(reinterpret_cast<const Mass*>(scratch)[i * most + head]);
        highest_of[head] = all.maximum;
        rest_of[head] = fast_log2(all.sum);
    }
    const uint32_t heads = args.digests.kv_heads;
    const uint64_t list = args.by_row ? uint64_t{static_cast<uint32_t>(args.step.row_of[entry])} * heads + pair % heads : pair;
    float* const scores = args.scores + list * max_blocks;
    for (uint32_t first = threadIdx.x; first < max_blocks; first += at_once * score_threads) {
        load(first);
#pragma unroll
        for (uint32_t i = 0; i < at_once; ++i) {
            const uint32_t block = first + i * score_threads;
            if (block >= max_blocks) break;
            float share[most], highest = -FLT_MAX;
#pragma unroll
            for (uint32_t head = 0; head < most; ++head) {
                if (head >= args.group) break;
                // one after the other: estimates of damaged pages are so large that a sum would swallow the rest
                share[head] = found[head][i] - highest_of[head] - rest_of[head];
                highest = fmaxf(highest, share[head]);
            }
            float sum = 0;
#pragma unroll
            for (uint32_t head = 0; head < most; ++head) {
                if (head < args.group) sum += fast_exp2(share[head] - highest);
            }
            // a block that no head can estimate
            const float score = highest < -1e37f ? -FLT_MAX : (highest + fast_log2(sum)) * ln_of_2;
            scores[block] = block < count ? score : -INFINITY;
        }
    }
}

// Whether this CTA brought the last of a pair's octets; what others wrote before can be read then.
__device__ inline bool completes(uint32_t& arrived, uint32_t brought, uint32_t octets, uint32_t& verdict) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        verdict = atomicAdd(&arrived, brought) + brought == octets;
        if (verdict) arrived = 0;  // for the next launch
    }
    __syncthreads();
    __threadfence();
    return verdict;
}

// Shared memory has room for three CTAs on a processor: more registers than they leave would cost one of them.
template <class Element, int kDim, int kChannels, Format kFormat, int kTiles>
__global__ void __launch_bounds__(score_threads, kTiles == 1 ? 3 : 2) score_blocks(const __grid_constant__ sh_score_blocks args) {
    using Memory = ScoreMemory<kDim, kChannels, kFormat>;
    extern __shared__ __align__(128) char shared[];
    const uint32_t heads = args.digests.kv_heads, active = active_of(args.step.active_rows, args.step.batch);
    auto* const before = reinterpret_cast<uint32_t*>(shared + Memory::before);
    count_octets(args, active, before);
    const uint32_t total = active ? before[active] * heads : 0;
    const uint32_t share = max(score_warps, (total + gridDim.x - 1) / gridDim.x);
    uint32_t at = min(blockIdx.x * share, total);
    const uint32_t end = min(at + share, total);
    if (at == end) return;
    uint32_t entry = 0;
    for (uint32_t upper = active; entry + 1 < upper;) {
        const uint32_t middle = (entry + upper) / 2;
        if (before[middle] * heads <= at) entry = middle;
        else upper = middle;
    }
    while (at < end) {
        const uint32_t octets = before[entry + 1] - before[entry], in_entry = at - before[entry] * heads;
        const uint32_t pair = entry * heads + in_entry / octets, first = in_entry % octets;
        const uint32_t last = min(octets, first + (end - at));
        estimate_octets<Element, kDim, kChannels, kFormat, kTiles>(args, shared, entry, pair, first, last);
        if (completes(args.arrived[pair], last - first, octets, before[args.step.batch + 1])) {
            finish_pair<kTiles>(args, entry, pair, reinterpret_cast<float*>(shared));  // octets are no longer needed
        }
        __syncthreads();
        at += last - first;
        while (at < end && at == before[entry + 1] * heads) ++entry;  // entries that are not scored have no octets
    }
}

}  // namespace sglang_hybrid::cuda
