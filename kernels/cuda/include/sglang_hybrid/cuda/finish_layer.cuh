// The end of a layer in one launch: wait for the worker's replies, shift their LSEs, merge with the local partial.
//
// A CTA for each batch entry, in two parts that do not wait for each other before the end:
//   waiting warps   one thread looks for the reply, then all of them read it in one round trip over PCIe, as in mailbox.cuh
//   shifting warps  a KV head each: estimates of the posted blocks by the real query and by the predicted one
// What the estimates cost hides behind PCIe. Then the waiting warps, which have the reply in registers, merge.
//
// With estimates a CTA takes nearly all registers of its processor for as long as it waits. Where other work should run
// there meanwhile, there is a variant without them (kChannels = no_shift), 128 threads, which can be given the shifts.
#pragma once

#include "sglang_hybrid/cuda/device_mailbox.cuh"
#include "sglang_hybrid/cuda/estimates.cuh"
#include "sglang_hybrid/cuda/lanes_api.h"
#include "sglang_hybrid/cuda/partials.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t shifting_warps = 8;
inline constexpr uint32_t waiting_threads = 128;
inline constexpr uint32_t waiting_loads = 10;  // of one thread on their way over PCIe, before it uses the first
inline constexpr int no_shift = -1;
inline constexpr uint32_t shifted_group = 2 * tile_heads;  // most query heads of a KV head

// Dynamic shared memory: an octet and its steps for each shifting warp, then LSE and shift of every query head.
template <int kDim, int kChannels, Format kFormat>
struct LayerMemory {
    using Here = Octet<kDim, kChannels, kFormat>;
    static constexpr uint32_t warp_bytes = Here::bytes + Here::step_bytes;
    static constexpr uint32_t shifting_threads = shifting_warps * 32;
    static constexpr uint32_t threads = shifting_threads + waiting_threads;
    static constexpr uint32_t lses = shifting_warps * warp_bytes;
    static constexpr uint32_t bytes(uint32_t heads) { return lses + 2 * heads * uint32_t(sizeof(float)); }
};

template <int kDim>
struct LayerMemory<kDim, no_shift, Format::minmax> {
    static constexpr uint32_t shifting_threads = 0, threads = waiting_threads, lses = 0;
    static constexpr uint32_t bytes(uint32_t heads) { return 2 * heads * uint32_t(sizeof(float)); }
};

// -- shift -------------------------------------------------------------------------------------------------------------

// By one warp: `lse_shift` of the reference for one list, to shifts [group]. `octet`: room for one and its steps.
template <class Element, int kDim, int kChannels, Format kFormat>
__device__ void shift_of_list(const sh_finish_layer& args, uint32_t pair, char* octet, float* shifts) {
    using Here = Octet<kDim, kChannels, kFormat>;
    const uint32_t lane = threadIdx.x % 32, group = args.wait.geometry.group, head = pair % args.digests.kv_heads;
    const auto count = static_cast<uint32_t>(min(max(args.counts[pair], 0), static_cast<int32_t>(args.most_misses)));
    if (count == 0) {
        if (lane < group) shifts[lane] = 0;
        return;
    }
    char* const written = octet + Here::bytes;
    const char* const steps = Here::steps(octet, written);
    const int32_t* const list = args.pages + uint64_t{pair} * args.most_misses;
    const uint64_t query = uint64_t{pair} * group * kDim * 2;
    const SketchSteps<kDim, kChannels, kFormat> sketch(args.digests, head, args.scale);

    // [real, predicted][tile][head 2j, 2j + 1]
    Mass mass[2][2][2];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) mass[i / 4][i / 2 % 2][i % 2] = Mass::none();
    for (uint32_t first = 0; first < count; first += octet_blocks) {
        int32_t page = lane < octet_blocks && first + lane < count ? list[first + lane] : -1;
        if (page >= 0 && static_cast<uint32_t>(page) >= args.digests.pages) page = -1;
        Here::request(shared_address(octet), args.digests, head, page, read_once_policy());
        commit_copies();
        wait_for_copies<0>();
        __syncwarp();
        sketch.template write<Element>(octet, written);
        __syncwarp();
        const bool listed = __shfl_sync(0xFFFFFFFF, page, lane / 4) >= 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t tile = i / 2, kind = i % 2;
            if (tile * tile_heads >= group) break;
            const auto* const asks = static_cast<const char*>(kind ? args.query_ahead : args.query) + query;
            const HeadTile<Element, kDim, kChannels, kFormat> asked(
                asks + tile * tile_heads * kDim * 2, group - tile * tile_heads, args.digests, head, args.scale, 0.0f);
            const float2 found = asked.estimate(shared_address(octet), steps);
            if (listed) {
                mass[kind][tile][0].add(found.x);
                mass[kind][tile][1].add(found.y);
            }
            __syncwarp();  // tensor cores want all lanes together, and the octet is free behind the last
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        Mass &real = mass[0][i / 2][i % 2], &ahead = mass[1][i / 2][i % 2];
#pragma unroll
        for (uint32_t step = 4; step < 32; step *= 2) {
            real = real.with_any(real.from_lane(step));
            ahead = ahead.with_any(ahead.from_lane(step));
        }
        const uint32_t which = i / 2 * tile_heads + lane % 4 * 2 + i % 2;
        const float shift = (real.log2() - ahead.log2()) * ln_of_2;
        if (lane < 4 && which < group) shifts[which] = isfinite(shift) ? shift : 0.0f;
    }
}

// -- kernel ------------------------------------------------------------------------------------------------------------

template <class Element, int kDim, int kChannels, Format kFormat>
__global__ void __launch_bounds__(LayerMemory<kDim, kChannels, kFormat>::threads, 1)
    finish_layer(const __grid_constant__ sh_finish_layer args) {
    using Memory = LayerMemory<kDim, kChannels, kFormat>;
    extern __shared__ __align__(128) char shared[];
    __shared__ sh_mailbox_outcome outcome;
    const sh_mailbox_wait& wait = args.wait;
    const uint32_t row = blockIdx.x, kv_heads = wait.geometry.kv_heads, group = wait.geometry.group;
    if (row >= wait.receipt->rows) return;
    const uint32_t heads = kv_heads * group;
    float* const lses = reinterpret_cast<float*>(shared + Memory::lses);
    float* const shifts = lses + heads;

    if constexpr (kChannels != no_shift) {
        if (threadIdx.x < Memory::shifting_threads) {
            const uint32_t warp = threadIdx.x / 32;
            for (uint32_t head = warp; head < kv_heads; head += shifting_warps) {
                shift_of_list<Element, kDim, kChannels, kFormat>(
                    args, row * kv_heads + head, shared + warp * Memory::warp_bytes, shifts + head * group);
            }
            sync_some<2>(Memory::threads);
            return;
        }
    }

    const uint32_t thread = threadIdx.x - Memory::shifting_threads;
    constexpr uint32_t head_quads = kDim / 4;
    const uint32_t quads = heads * head_quads, group_quads = group * head_quads;
    const uint64_t sequence = wait.receipt->sequence;
    const uint32_t* const lists = lists_of(wait.receipt, row, kv_heads);
    const DeviceMailbox mailbox(wait.state->mailbox, wait.geometry, wait.layout);
    if (thread == 0) {
        if (lists[0] == 0) outcome = sh_row_empty;
        else if (sequence == 0) outcome = sh_row_withheld;
        else outcome = wait_for_sequence(wait, mailbox, row);
    }
    sync_some<1>(waiting_threads);
    const bool is_there = outcome == sh_row_served;

    float4 loaded[waiting_loads];
    const auto load = [&](uint32_t first) {
        bool listed[waiting_loads];  // known before the first load over PCIe
#pragma unroll
        for (uint32_t i = 0; i < waiting_loads; ++i) {
            const uint32_t quad = first + i * waiting_threads;
            listed[i] = quad < quads && lists[1 + quad / group_quads];
        }
#pragma unroll
        for (uint32_t i = 0; i < waiting_loads; ++i) {
            if (listed[i]) loaded[i] = mailbox.output(sequence, row)[first + i * waiting_threads];
        }
    };
    uint2 fields{};
    if (is_there) {
        load(thread);
        if (thread == 0) fields = load_fields(mailbox.reply(sequence, row));
    }
    for (uint32_t head = thread; head < heads; head += waiting_threads) {
        const bool holds = is_there && lists[1 + head / group];
        lses[head] = holds ? mailbox.lse(sequence, row)[head] : -INFINITY;
        if constexpr (kChannels == no_shift) shifts[head] = args.shifts ? args.shifts[uint64_t{row} * heads + head] : 0.0f;
    }
    sync_some<1>(waiting_threads);  // every thread knows is_there
    if (thread == 0) {
        if (is_there) outcome = outcome_of(fields, wait.receipt->generation);
        wait.served[row] = outcome == sh_row_served || outcome == sh_row_empty;
        atomicAdd(reinterpret_cast<unsigned long long*>(&wait.state->outcomes[outcome]), 1ull);
    }
    sync_some<2>(Memory::threads);  // the shifts are there too

    const bool served = outcome == sh_row_served;
    const auto* const local_out = reinterpret_cast<const float4*>(args.local.out) + uint64_t{row} * quads;
    const float* const local_lse = args.local.lse + uint64_t{row} * heads;
    for (uint32_t first = thread; first < quads; first += waiting_loads * waiting_threads) {
        if (served && first != thread) load(first);
#pragma unroll
        for (uint32_t i = 0; i < waiting_loads; ++i) {
            const uint32_t quad = first + i * waiting_threads, head = quad / head_quads;
            if (quad >= quads) continue;
            const bool holds = served && lses[head] != -INFINITY;  // else the worker left it alone
            const Partial worker = holds ? Partial{loaded[i], lses[head] + shifts[head]} : empty_partial();
            const Partial all = merged({local_out[quad], local_lse[head]}, worker);
            static_cast<uint2*>(args.out)[uint64_t{row} * quads + quad] = {Element::pack(all.out.x, all.out.y),
                                                                          Element::pack(all.out.z, all.out.w)};
        }
    }
}

}  // namespace sglang_hybrid::cuda
