// Attention of one token over the blocks that are in device memory.
//
// The time goes into reading keys and values, so the kernel is built to keep enough loads in flight:
//   share  Slots of all (batch entry, KV head) pairs are one long list, and every CTA that the device can run gets an
//          equally long part of it, whatever the number of active rows. Parts begin and end within pairs, so CTAs change
//          from pair to pair at different times, and others use the memory meanwhile.
//   warp   A warp takes every n-th slot of its CTA and waits for no other warp until the end of a pair: there is no barrier in
//          the loop. It has three tiles (32 tokens of keys or of values), and while it computes with one, the other two are
//          being loaded.
//   group  The G query heads are the 16 rows of a tensor core product, with zeros if there are fewer heads. The wasted
//          arithmetic costs no time here.
// Partial results of warps are merged in shared memory. Partial results of CTAs that share a pair are merged by the CTA that
// finishes last, in the order of the slots. So results depend on the number of active rows, but not on the order in which CTAs
// finish.
#pragma once

#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/warp_attention.cuh"

namespace sglang_hybrid::cuda {

// -- which slots -------------------------------------------------------------------------------------------------------

// How a launch is spread over the device.
struct Spread {
    uint32_t slots;  // of each pair (batch entry, KV head); at least 1, so that every pair gets a result
    uint32_t ctas;   // that the device runs at a time
};

// Division of the slots of all active pairs among CTAs. Slot s of pair p is number p * slots + s.
struct Shares {
    uint32_t slots, total, share;

    __device__ Shares(const Spread& spread, uint32_t pairs, uint32_t warps)
        : slots(spread.slots), total(pairs * spread.slots), share(max(warps, (total + spread.ctas - 1) / spread.ctas)) {
        // CTAs take a little more if they then begin and end with pairs: that saves merging
        const uint32_t even = share < slots ? (slots + slots / share - 1) / (slots / share) : slots;
        if (even >= share && slots % even == 0 && even * 16 <= share * 17) share = even;
    }

    __device__ uint32_t begin(uint32_t cta) const { return min(cta * share, total); }
    __device__ uint32_t first_cta(uint32_t pair) const { return pair * slots / share; }
    __device__ uint32_t last_cta(uint32_t pair) const { return (pair * slots + slots - 1) / share; }
    // Return the index of a CTA's partial result of a pair. A CTA has at most two partial results: one of the pair that its
    // part begins within, and one of a pair that it begins and leaves to the next CTA.
    __device__ uint32_t partial(uint32_t pair, uint32_t cta) const { return 2 * cta + (cta == first_cta(pair)); }
};

// Iterates over the slots of a warp that hold tokens. Lane i has the i-th of the next 32 slots.
class WarpSlots {
  public:
    struct Slot {
        const char* keys;
        const char* values;
        uint32_t tokens;  // 0: there is no slot left
        bool is_near;     // a sink, recent or tail block
    };

    __device__ WarpSlots(const sh_attend_slots& args, uint32_t row, uint32_t head, int32_t length, uint32_t first,
                         uint32_t step, uint32_t end)
        : args_(args), list_((uint64_t{row} * args.kv_heads + head) * args.slots), length_(length),
          recent_((int64_t{length} - 1) / block_tokens - args.recent), next_(first), step_(step), end_(end) {
        look();
    }

    __device__ Slot take(uint32_t block_bytes) {
        while (!held_) {
            if (next_ >= end_) return {nullptr, nullptr, 0, false};
            look();
        }
        const uint32_t lane = __ffs(held_) - 1;
        held_ &= held_ - 1;
        const uint32_t slot = base_ + lane * step_;
        const uint32_t tokens = __shfl_sync(0xFFFFFFFF, tokens_, lane);
        const uint64_t at = (list_ + slot) * block_bytes;
        return {static_cast<const char*>(args_.keys) + at, static_cast<const char*>(args_.values) + at, tokens,
                (near_ >> lane & 1) != 0};
    }

  private:
    __device__ void look() {
        const uint32_t slot = next_ + threadIdx.x % warp_size * step_;
        const int64_t position = slot < end_ ? args_.positions[list_ + slot] : -1;
        const int64_t behind = length_ - position * block_tokens;
        tokens_ = position < 0 || behind <= 0 ? 0 : static_cast<uint32_t>(min(behind, int64_t{block_tokens}));
        held_ = __ballot_sync(0xFFFFFFFF, tokens_ != 0);
        near_ = __ballot_sync(0xFFFFFFFF, position < int64_t{args_.sink} || position >= recent_);
        base_ = next_;
        next_ += warp_size * step_;
    }

    const sh_attend_slots& args_;
    const uint64_t list_;  // first slot of the (row, KV head)
    const int64_t length_, recent_;  // tokens, and the first block that is recent
    uint32_t next_, base_ = 0;
    const uint32_t step_, end_;
    uint32_t held_ = 0, near_ = 0, tokens_ = 0;
};

// -- computation of a warp ---------------------------------------------------------------------------------------------

__device__ inline uint32_t first_tokens(uint32_t tokens) { return tokens >= block_tokens ? 0xFFFFFFFF : (1u << tokens) - 1; }

// Which tokens of a block count: the first ones, or those in the block's mask if lists have masks.
template <class Slot>
struct CountedTokens {
    uint32_t tokens;
    __device__ explicit CountedTokens(const Slot& slot) : tokens(slot.tokens) {}
    __device__ bool operator()(uint32_t token) const { return token < tokens; }
};
template <class Slot>
    requires requires(const Slot& slot) { slot.mask; }
struct CountedTokens<Slot> {
    uint32_t mask;
    __device__ explicit CountedTokens(const Slot& slot) : mask(slot.mask) {}
    __device__ bool operator()(uint32_t token) const { return mask >> token & 1; }
};

// Return whether a block's logits get the bias. Without is_near in the type of slots, no block's logits do.
template <class Slot>
__device__ bool has_bias(const Slot& slot) {
    if constexpr (requires { slot.is_near; }) return slot.is_near;
    else return false;
}

// -- results -----------------------------------------------------------------------------------------------------------

// Maximum and sum of the softmax over several parts, from the maxima and sums of the parts.
struct Union {
    float maximum = -INFINITY, sum = 0;

    __device__ Union(const float* maxima, const float* sums, uint32_t count, uint32_t stride) {
        for (uint32_t i = 0; i < count; ++i) maximum = fmaxf(maximum, maxima[i * stride]);
        for (uint32_t i = 0; i < count; ++i) sum += weight(maxima[i * stride]) * sums[i * stride];
    }
    __device__ float weight(float of) const { return of == -INFINITY ? 0.0f : exp2f(of - maximum); }
    __device__ float share(float of) const { return sum > 0 ? of / sum : 0.0f; }
    __device__ float lse() const { return sum > 0 ? (maximum + log2f(sum)) * ln_2 : -INFINITY; }
};

// Merge the results of a CTA's warps: call store(i, row, quad, all) for each four channels of a row. i counts quads over all
// rows; `all` is the row's Union.
template <int kDim, uint32_t kBytes, class Store>
__device__ void merge_warps(char* shared, const SharedMemory& at, uint32_t warps, uint32_t group, Store store) {
    const auto* const maxima = reinterpret_cast<const float*>(shared + at.maxima);
    const auto* const sums = reinterpret_cast<const float*>(shared + at.sums);
    for (uint32_t i = threadIdx.x; i < group * kDim / 4; i += blockDim.x) {
        const uint32_t row = i / (kDim / 4);
        const Union all(maxima + row, sums + row, warps, query_rows);
        float4 total = make_float4(0, 0, 0, 0);
        for (uint32_t warp = 0; warp < warps; ++warp) {
            const float4 one = OutRows<kDim>::load(shared + at.tiles + warp * attend_tiles * Tile<kDim, kBytes>::bytes, i);
            total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
        }
        store(i, row, make_float4(all.share(total.x), all.share(total.y), all.share(total.z), all.share(total.w)), all);
    }
}

// For merge_warps and merge_ctas: stores output and LSE in float32.
template <int kDim>
struct PartialResult {
    float* out;  // [group][kDim]
    float* lse;  // [group]

    __device__ void operator()(uint32_t i, uint32_t row, float4 quad, float of_row) const {
        reinterpret_cast<float4*>(out)[i] = quad;
        if (i % (kDim / 4) == 0) lse[row] = of_row;
    }
    __device__ void operator()(uint32_t i, uint32_t row, float4 quad, const Union& all) const {
        (*this)(i, row, quad, all.lse());
    }
};

// Return how many partial results of a pair merge_ctas can merge in the memory of the tiles.
__host__ __device__ inline uint32_t most_parts(uint32_t head_dim, uint32_t of_value, uint32_t warps, uint32_t group) {
    const uint32_t tiles = warps * attend_tiles * block_tokens * head_dim * of_value, sums = warps * group * head_dim * 4;
    return (tiles - sums) / (group * uint32_t(sizeof(float))) - 1;
}

// Merge the partial results of a pair: place(i) is the place of the i-th of `count`, and store(i, row, quad, lse) is called as
// in merge_warps. Called by the CTA that finishes last. Loads bypass its L1 cache, which does not have the results of other
// CTAs. Warps share the parts, and a lane has many loads in flight, the first of them before it knows the weights: the latency
// of one load after the other would be most of a small launch.
template <int kDim, class Place, class Store>
__device__ void merge_ctas(const float* partial_out, const float* partial_lse, uint32_t group, uint32_t count, Place place,
                           char* scratch, Store store) {
    constexpr uint32_t of_lane = 5, at_once = 5;  // quads, and parts of each; five heads of 128 channels take one turn
    const uint32_t quads = group * kDim / 4, warps = blockDim.x / warp_size;
    const uint32_t warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    auto* const sums = reinterpret_cast<float4*>(scratch);                 // [warps][quads]
    auto* const weights = reinterpret_cast<float*>(sums + warps * quads);  // [count][group], LSEs at first
    auto* const lses = weights + count * group;                            // [group] of the union
    float4 loaded[at_once][of_lane];
    const auto load = [&](uint32_t first, uint32_t from) {
#pragma unroll
        for (uint32_t p = 0; p < at_once; ++p) {
            const uint32_t part = from + p * warps;
            const auto* const of_part = reinterpret_cast<const float4*>(partial_out) + place(min(part, count - 1)) * quads;
#pragma unroll
            for (uint32_t q = 0; q < of_lane; ++q) {
                const uint32_t quad = first + q * warp_size;
                loaded[p][q] = part < count && quad < quads ? __ldcg(of_part + quad) : make_float4(0, 0, 0, 0);
            }
        }
    };
    // LSEs are loaded first: they are few and needed first
    const auto load_lse = [&](uint32_t i) { return __ldcg(partial_lse + place(i / group) * group + i % group) * log2_e; };
    const float first_lse = threadIdx.x < count * group ? load_lse(threadIdx.x) : 0.0f;
    load(lane, warp);
    if (threadIdx.x < count * group) weights[threadIdx.x] = first_lse;
    for (uint32_t i = threadIdx.x + blockDim.x; i < count * group; i += blockDim.x) weights[i] = load_lse(i);
    __syncthreads();
    for (uint32_t row = warp; row < group; row += warps) {
        float highest = lowest_logit, sum = 0;  // finite, so that an empty part has weight 0; its output is 0 too
        for (uint32_t part = lane; part < count; part += warp_size) highest = fmaxf(highest, weights[part * group + row]);
#pragma unroll
        for (uint32_t step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFF, highest, step));
        for (uint32_t part = lane; part < count; part += warp_size) sum += exp2f(weights[part * group + row] - highest);
#pragma unroll
        for (uint32_t step = 16; step; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        for (uint32_t part = lane; part < count; part += warp_size) {
            float& weight = weights[part * group + row];
            weight = sum > 0 ? exp2f(weight - highest) / sum : 0.0f;
        }
        if (lane == 0) lses[row] = sum > 0 ? (highest + log2f(sum)) * ln_2 : -INFINITY;
    }
    __syncthreads();
    for (uint32_t first = lane; first < quads; first += of_lane * warp_size) {
        float4 total[of_lane] = {};
        for (uint32_t from = warp; from < count; from += at_once * warps) {
            if (first != lane || from != warp) load(first, from);
#pragma unroll
            for (uint32_t p = 0; p < at_once; ++p) {
                const uint32_t part = from + p * warps;
                if (part >= count) continue;
#pragma unroll
                for (uint32_t q = 0; q < of_lane; ++q) {
                    const uint32_t quad = first + q * warp_size;
                    if (quad >= quads) continue;
                    const float weight = weights[part * group + quad / (kDim / 4)];
                    total[q].x += weight * loaded[p][q].x, total[q].y += weight * loaded[p][q].y;
                    total[q].z += weight * loaded[p][q].z, total[q].w += weight * loaded[p][q].w;
                }
            }
        }
#pragma unroll
        for (uint32_t q = 0; q < of_lane; ++q) {
            if (first + q * warp_size < quads) sums[warp * quads + first + q * warp_size] = total[q];
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < quads; i += blockDim.x) {
        float4 total = make_float4(0, 0, 0, 0);
        for (uint32_t one = 0; one < warps; ++one) {
            const float4 of_warp = sums[one * quads + i];
            total.x += of_warp.x, total.y += of_warp.y, total.z += of_warp.z, total.w += of_warp.w;
        }
        const uint32_t row = i / (kDim / 4);
        store(i, row, total, lses[row]);
    }
}

// Return whether this CTA is the last of `count` CTAs to call this; the last CTA can then read what the others wrote before.
// Called by a whole CTA.
__device__ inline bool is_last(uint32_t& arrived, uint32_t count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&arrived, 1u) == count - 1;
        if (last) arrived = 0;  // for the next launch
    }
    __syncthreads();
    __threadfence();
    return last;
}

// -- kernel ------------------------------------------------------------------------------------------------------------

// Blocks of codes, one after the other, and the factors of their tokens.
struct CodedBlocks {
    const char* keys = nullptr;
    const char* values = nullptr;
    const uint16_t* factors = nullptr;  // [blocks][2][32]

    // Return the factors of the keys, or of the values, that begin at `block`.
    __device__ const char* factors_of(const char* block, bool is_value, uint32_t block_bytes) const {
        const uint64_t number = static_cast<uint64_t>(block - (is_value ? values : keys)) / block_bytes;
        return reinterpret_cast<const char*>(factors + number * slot_factors + is_value * block_tokens);
    }
};

// Attend to the blocks of a list, and write the result of each warp, weighted as a part of one softmax, to the memory of its
// tiles. begin(warp, warps) returns an iterator, whose take() returns the blocks of a warp one after the other. `dtype`: of
// pool and queries; of queries alone, if blocks are codes. `bias`: [group], for the blocks that get one; or null. `steps`: of
// the codes; `coded`: where the blocks of a list of codes and their factors are. Called by a whole CTA.
template <class Element, int kDim, class Begin>
__device__ void attend_list(const void* queries, DType dtype, uint32_t group, float scale, const float* bias, char* shared,
                            const SharedMemory& at, Begin begin, const CodeSteps& steps = {}, const CodedBlocks& coded = {}) {
    using BlockTile = Tile<kDim, value_bytes<Element>>;
    const uint32_t warps = blockDim.x / warp_size, warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    auto mine = begin(warp, warps);
    constexpr uint32_t block_bytes = BlockTile::bytes;
    const uint32_t tiles = shared_address(shared + at.tiles) + warp * attend_tiles * block_bytes;
    uint32_t key_tile = tiles, value_tile = tiles + block_bytes, next_tile = tiles + 2 * block_bytes;
    // keys and values leave the L2 cache first; lists and tables, which every layer reads, stay in it
    const uint64_t policy = read_once_policy();
    // where in shared memory the factors of a tile's tokens are
    const auto factors_of = [&](uint32_t tile) {
        return shared + at.token_factors + (warp * attend_tiles + (tile - tiles) / block_bytes) * token_factor_bytes;
    };
    const auto request = [&](uint32_t tile, const char* block, const auto& of, bool is_value = false) {
        if (of.tokens) {
            BlockTile::request(tile, block, CountedTokens(of), lane, policy);
            if constexpr (is_coded<Element>) {
                const char* const from = coded.factors_of(block, is_value, block_bytes);
                if (lane < token_factor_bytes / 16)
                    copy_async(shared_address(factors_of(tile)) + lane * 16, from + lane * 16, true, policy);
            }
        }
        commit_copies();  // also commits an empty group, since waiting counts groups
    };
    auto slot = mine.take(block_bytes);
    request(key_tile, slot.keys, slot);
    request(value_tile, slot.values, slot, true);
    auto next = mine.take(block_bytes);
    request(next_tile, next.keys, next);

    // load the query's rows, zeros behind the last head; not by asynchronous copies, for which the wait would come after the
    // copies of the blocks
    wait_for_launch_before();
    auto* const factors = reinterpret_cast<float*>(shared + at.factors);
    if constexpr (value_bytes<Element> == 1) {
        const bool is_bfloat16 = model_dtype<Element>(dtype) == DType::bf16;
        write_scaled_queries<kDim>(queries, group, is_bfloat16, steps.keys, shared + at.query, factors);
    } else {
        for (uint32_t i = threadIdx.x; i < query_rows * Tile<kDim>::row_chunks; i += blockDim.x) {
            const uint32_t query_row = i / Tile<kDim>::row_chunks;
            *reinterpret_cast<uint4*>(shared + at.query + Tile<kDim>::place(query_row, i % Tile<kDim>::row_chunks)) =
                query_row < group ? __ldcg(static_cast<const uint4*>(queries) + i) : uint4{0, 0, 0, 0};
        }
    }
    __syncthreads();

    WarpAttention<Element, kDim> attention(shared_address(shared + at.query), scale, factors);
    attention.set_bias(bias, group);
    while (slot.tokens) {
        wait_for_copies<2>();
        __syncwarp();
        attention.add_keys(key_tile, CountedTokens(slot), has_bias(slot), factors_of(key_tile));
        __syncwarp();  // all lanes are done with the tile
        request(key_tile, next.values, next, true);
        wait_for_copies<2>();
        __syncwarp();
        attention.add_values(value_tile, factors_of(value_tile));
        __syncwarp();
        slot = next;
        next = mine.take(block_bytes);
        request(value_tile, next.keys, next);
        // of the block in `slot`, the keys are in next_tile and the values in what was key_tile
        const uint32_t freed = value_tile;
        value_tile = key_tile;
        key_tile = next_tile;
        next_tile = freed;
    }
    wait_for_copies<0>();
    __syncwarp();

    auto* const maxima = reinterpret_cast<float*>(shared + at.maxima);
    auto* const sums = reinterpret_cast<float*>(shared + at.sums);
    attention.write_sums(maxima + warp * query_rows, sums + warp * query_rows);
    __syncthreads();
    // this warp's tiles are free
    attention.write_out(
        reinterpret_cast<float*>(shared + at.tiles + warp * attend_tiles * block_bytes), group, steps.values,
        [&](uint32_t r) { return Union(maxima + r, sums + r, warps, query_rows).weight(maxima[warp * query_rows + r]); });
    __syncthreads();
}

// Attend to slots `from` to `to` of a pair. Called by a whole CTA.
template <class Element, int kDim>
__device__ void attend_part(const sh_attend_slots& args, char* shared, const SharedMemory& at, uint32_t pair, uint32_t from,
                            uint32_t to) {
    const uint32_t entry = pair / args.kv_heads, head = pair % args.kv_heads;
    const int32_t row = args.row_of[entry];
    const auto* const query = static_cast<const char*>(args.query) + uint64_t{pair} * args.group * kDim * 2;
    const bool exists = row >= 0 && static_cast<uint32_t>(row) < args.rows;
    const uint64_t of_row = (uint64_t{exists ? static_cast<uint32_t>(row) : 0} * args.kv_heads + head) * args.group;
    const float* const bias = args.near_bias ? args.near_bias + of_row : nullptr;
    const auto dtype = static_cast<DType>(args.dtype);
    const auto begin = [&](uint32_t warp, uint32_t warps) {
        const uint32_t end = exists ? min(to, args.slots) : 0;
        return WarpSlots(args, exists ? row : 0, head, exists ? args.lengths[row] : 0, from + warp, warps, end);
    };
    const CodeSteps steps(args.steps, args.kv_heads, kDim, head);
    const CodedBlocks coded{static_cast<const char*>(args.keys), static_cast<const char*>(args.values), args.factors};
    attend_list<Element, kDim>(query, dtype, args.group, args.scale, bias, shared, at, begin, steps, coded);
}

// Warps that a processor has registers for. Small heads and numbers of one byte need so little shared memory that it has room
// for more warps.
inline constexpr uint32_t resident_warps = 12;

template <class Element, int kDim>
__global__ void __launch_bounds__(attend_warps* warp_size, value_bytes<Element> == 1 ? resident_warps / attend_warps : 0)
    attend_slots(const __grid_constant__ sh_attend_slots args, const __grid_constant__ Spread spread) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t warps = blockDim.x / warp_size;
    constexpr uint32_t of_value = value_bytes<Element>;
    const SharedMemory at(kDim, warps, of_value);
    const Shares shares(spread, active_of(args.active_rows, args.batch) * args.kv_heads, warps);
    const uint32_t end = shares.begin(blockIdx.x + 1);

    for (uint32_t slot = shares.begin(blockIdx.x); slot < end;) {
        const uint32_t pair = slot / shares.slots, from = slot % shares.slots;
        const uint32_t to = min(shares.slots, from + (end - slot));
        attend_part<Element, kDim>(args, shared, at, pair, from, to);

        float* const out = args.out + uint64_t{pair} * args.group * kDim;
        float* const lse = args.lse + uint64_t{pair} * args.group;
        if (to - from == shares.slots) {
            merge_warps<kDim, of_value>(shared, at, warps, args.group, PartialResult<kDim>{out, lse});
        } else {
            const uint64_t partial = shares.partial(pair, blockIdx.x);
            merge_warps<kDim, of_value>(
                shared, at, warps, args.group,
                PartialResult<kDim>{args.partial_out + partial * args.group * kDim, args.partial_lse + partial * args.group});
            const uint32_t ctas = shares.last_cta(pair) - shares.first_cta(pair) + 1;
            // the tiles are free by now
            if (is_last(args.arrived[pair], ctas)) {
                const uint32_t first = shares.first_cta(pair);
                merge_ctas<kDim>(
                    args.partial_out, args.partial_lse, args.group, ctas,
                    [&](uint32_t i) { return uint64_t{shares.partial(pair, first + i)}; }, shared + at.tiles,
                    PartialResult<kDim>{out, lse});
            }
        }
        slot += to - from;
        __syncthreads();  // shared memory is free for the next pair
    }
}

}  // namespace sglang_hybrid::cuda
