// The GPU as the client of the mailbox: kernels that post a layer, and wait for its replies. mailbox.h says what is written in
// which order, and why.
//
// A post has one CTA per row, so that the worker begins with the first row while others are written, and one more CTA that
// announces the post. Numbers that change from post to post (sequence, generation, the mailbox's address) are in device memory
// and are advanced by the CTA that finishes last, so that a replayed CUDA graph posts with new numbers.
//
// A worker that was late once gets no new posts until it has completed all old ones, as with the CPU's client: otherwise every
// layer of a step would wait for its whole deadline in vain. wait_for_replies records a late post in `late`; post_layer reads
// `late` at its end and decides whether the next post is withheld. So all CTAs of a post see the same decision, whatever runs
// beside them.
#pragma once

#include "sglang_hybrid/cuda/device_mailbox.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t post_threads = 256;
inline constexpr uint32_t wait_threads = 256;
inline constexpr uint32_t wait_loads = 5;  // over PCIe that a thread has in flight before it stores the first
inline constexpr uint32_t most_kv_heads = 256;  // that the geometry of a mailbox may have
inline constexpr uint32_t impossible_blocks = UINT32_MAX;  // of a row: no lists add up to this number, so the worker refuses

// -- post --------------------------------------------------------------------------------------------------------------

// Return the number of blocks in all lists of a row, or impossible_blocks if the count of a list is out of bounds. Write the
// count of each list, 0 if it is out of bounds, to `counts` and to the receipt. Called by the whole CTA.
__device__ inline uint32_t count_blocks(const sh_mailbox_post& args, uint32_t row, uint32_t (&counts)[most_kv_heads]) {
    __shared__ uint32_t total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    const uint32_t most = min(args.listed, args.geometry.max_blocks);
    bool wrong = false;
    for (uint32_t head = threadIdx.x; head < args.geometry.kv_heads; head += post_threads) {
        const int32_t count = args.counts[row * args.geometry.kv_heads + head];
        wrong = count < 0 || static_cast<uint32_t>(count) > most;
        counts[head] = wrong ? 0 : static_cast<uint32_t>(count);
        lists_of(args.receipt, row, args.geometry.kv_heads)[1 + head] = counts[head];
        atomicAdd(&total, counts[head]);
    }
    wrong = __syncthreads_or(wrong);
    const uint32_t blocks = wrong ? impossible_blocks : total;
    if (threadIdx.x == 0) *lists_of(args.receipt, row, args.geometry.kv_heads) = blocks;
    return blocks;
}

// Write the weights of listed blocks, for all query heads of the row; zeros for positions that `weights` do not have. Called by
// the whole CTA.
__device__ inline void write_weights(const sh_mailbox_post& args, const DeviceMailbox& mailbox, uint64_t sequence, uint32_t row,
                                     const uint32_t (&counts)[most_kv_heads]) {
    constexpr uint32_t quads = block_tokens / 4;  // of a block
    const uint32_t group = args.geometry.group;
    for (uint32_t query_head = 0; query_head < args.geometry.kv_heads * group; ++query_head) {
        const uint64_t list = uint64_t{row} * args.geometry.kv_heads + query_head / group;
        const int32_t* const positions = args.positions + list * args.listed;
        const uint64_t first = (uint64_t{row} * args.geometry.kv_heads * group + query_head) * args.weight_blocks;
        auto* const to = reinterpret_cast<float4*>(mailbox.weights(sequence, row, query_head));
        for (uint32_t i = threadIdx.x; i < counts[query_head / group] * quads; i += post_threads) {
            const int32_t position = positions[i / quads];
            const bool is_block = position >= 0 && static_cast<uint32_t>(position) < args.weight_blocks;
            const uint64_t from = (first + static_cast<uint32_t>(is_block ? position : 0)) * quads + i % quads;
            to[i] = is_block ? reinterpret_cast<const float4*>(args.weights)[from] : make_float4(0, 0, 0, 0);
        }
    }
}

__device__ inline void write_request(const sh_mailbox_post& args, const DeviceMailbox& mailbox, uint64_t sequence,
                                     uint32_t generation, uint32_t row, uint32_t blocks,
                                     const uint32_t (&counts)[most_kv_heads]) {
    // what the mailbox has there now is no reply to this post, even if its sequence number says so
    if (threadIdx.x == 0) store_relaxed(mailbox.reply(sequence, row).sequence, 0);
    if (blocks) {
        const uint32_t kv_heads = args.geometry.kv_heads;
        for (uint32_t head = threadIdx.x; head < kv_heads; head += post_threads) {
            List& list = mailbox.lists(sequence, row)[head];
            const bool is_filled = counts[head] && args.last_fill;
            const uint32_t last_fill = is_filled ? uint32_t(args.last_fill[row * kv_heads + head]) : block_tokens;
            *reinterpret_cast<uint2*>(&list) = make_uint2(counts[head], last_fill);
        }
        const uint64_t listed = uint64_t{kv_heads} * args.listed;
        for (uint32_t i = threadIdx.x; i < listed; i += post_threads) {
            const uint32_t head = i / args.listed, place = i % args.listed;
            if (place >= counts[head]) continue;
            mailbox.pages(sequence, row, head)[place] = uint32_t(args.pages[row * listed + i]);
            if (args.masks) mailbox.masks(sequence, row, head)[place] = uint32_t(args.masks[row * listed + i]);
        }
        const uint32_t chunks = mailbox.query_row_bytes() / sizeof(uint4), chunks_of_head = chunks / kv_heads;
        const uint4* const query = static_cast<const uint4*>(args.query) + uint64_t{row} * chunks;
        for (uint32_t i = threadIdx.x; args.query && i < chunks; i += post_threads) {
            if (counts[i / chunks_of_head]) mailbox.query(sequence, row)[i] = query[i];
        }
        if (args.weights) write_weights(args, mailbox, sequence, row, counts);
    }
    __syncthreads();
    if (threadIdx.x) return;
    Request& request = mailbox.request(sequence, row);
    store_relaxed(request.generation, generation);
    store_relaxed(request.blocks, blocks);
    store_release(request.sequence, sequence);
}

__device__ inline PostKind kind_of(const sh_mailbox_post& args) {
    if (args.weights) return PostKind::sum_values;
    return args.masks ? PostKind::attend_masked : PostKind::attend;
}

__device__ inline void announce(const sh_mailbox_post& args, const DeviceMailbox& mailbox, uint64_t sequence, uint32_t rows) {
    Post& post = mailbox.post(sequence);
    store_relaxed(post.layer, args.layer);
    store_relaxed(post.rows, rows);
    store_relaxed(post.scale, args.scale);
    store_relaxed(post.kind, static_cast<uint32_t>(kind_of(args)));
    store_release(post.sequence, sequence);
    store_release(mailbox.bell().posted, sequence);
}

// Set the state for the next launch. Called by one thread of the CTA that finishes last.
__device__ inline void finish_post(sh_mailbox_state& state, const DeviceMailbox& mailbox, uint64_t newest,
                                   uint32_t generation) {
    state.finished = 0;
    state.sequence = newest;
    state.generation = generation;
    auto* const late = reinterpret_cast<unsigned long long*>(&state.late);
    const unsigned long long seen = atomicAdd(late, 0ull);
    if (!seen || !state.mailbox) return;
    // if `late` changed meanwhile, another post is late
    const bool through = load_acquire(mailbox.worker().completed) >= newest && atomicCAS(late, seen, 0ull) == seen;
    state.withheld = !through;
}

// Count how long the step before waited for the worker, and clear its waits. Called by a whole CTA of the first post of a step:
// the waits of the step before are over, and those of this step have not begun.
__device__ inline void count_waits(const sh_mailbox_post& args) {
    __shared__ unsigned long long waited;
    if (threadIdx.x == 0) waited = 0;
    __syncthreads();
    for (uint32_t layer = threadIdx.x; layer < args.geometry.layers; layer += post_threads) {
        const uint64_t of_layer = args.layer_waits[layer];
        if (!of_layer) continue;
        atomicAdd(&waited, static_cast<unsigned long long>(of_layer));
        args.layer_waits[layer] = 0;
    }
    __syncthreads();
    if (threadIdx.x || !waited) return;
    uint32_t bucket = 0;
    for (uint64_t bound = sh_wait_first_ns; waited > bound && bucket + 1 < sh_wait_buckets; bound *= 2) ++bucket;
    args.state->waits[bucket] += 1;
    args.state->waited_ns += waited;
}

// CTA 0 announces the post; each further CTA writes the request of one batch entry.
__global__ void __launch_bounds__(post_threads) post_layer(const __grid_constant__ sh_mailbox_post args) {
    __shared__ uint32_t counts[most_kv_heads];
    sh_mailbox_state& state = *args.state;
    const uint32_t rows = active_of(args.active_rows, args.batch);
    const bool posts = state.mailbox && !state.withheld && rows;
    const uint64_t before = state.sequence, sequence = before + 1;
    const uint32_t generation = state.generation + args.begins_step;
    const DeviceMailbox mailbox(state.mailbox, args.geometry, args.layout);

    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            if (posts) announce(args, mailbox, sequence, rows);
            *args.receipt = {posts ? sequence : 0, generation, rows, args.layer, 0};
        }
        if (args.begins_step && args.layer_waits) count_waits(args);
    } else if (blockIdx.x - 1 < rows) {
        const uint32_t row = blockIdx.x - 1;
        const uint32_t blocks = count_blocks(args, row, counts);
        if (posts) write_request(args, mailbox, sequence, generation, row, blocks, counts);
    }

    __syncthreads();  // every thread has read the state
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&state.finished, 1u) == gridDim.x - 1) finish_post(state, mailbox, posts ? sequence : before, generation);
}

// -- wait --------------------------------------------------------------------------------------------------------------

// A CTA for each batch entry. Fields and arrays of a reply are read in one round trip over PCIe; the fields decide afterwards
// whether the arrays count. These are plain loads, which a warp's threads make together: one thread's acquire and the barrier
// behind it order the loads of all threads, and the acquire emptied the L1 cache.
__global__ void __launch_bounds__(wait_threads) wait_for_replies(const __grid_constant__ sh_mailbox_wait args) {
    extern __shared__ float lses[];  // of the row's query heads
    __shared__ sh_mailbox_outcome outcome;
    const uint32_t row = blockIdx.x;
    if (row >= args.receipt->rows) return;
    const uint64_t sequence = args.receipt->sequence;
    const uint32_t* const lists = lists_of(args.receipt, row, args.geometry.kv_heads);
    const DeviceMailbox mailbox(args.state->mailbox, args.geometry, args.layout);
    const uint32_t heads = mailbox.heads(), head_quads = args.geometry.head_dim / 4, quads = heads * head_quads;
    const uint32_t group_quads = args.geometry.group * head_quads;
    float4* const out = reinterpret_cast<float4*>(args.out) + uint64_t{row} * quads;

    uint64_t waited_ns = 0;
    const bool is_asked = lists[0] && sequence;
    if (threadIdx.x == 0) {
        if (lists[0] == 0) outcome = sh_row_empty;
        else if (sequence == 0) outcome = sh_row_withheld;
        else outcome = wait_for_sequence(args, mailbox, row, waited_ns);
    }
    __syncthreads();
    const bool is_there = outcome == sh_row_served;

    float4 loaded[wait_loads];
    const auto load = [&](uint32_t first) {
        bool listed[wait_loads];  // known before the first load over PCIe
#pragma unroll
        for (uint32_t i = 0; i < wait_loads; ++i) {
            const uint32_t quad = first + i * wait_threads;
            listed[i] = quad < quads && lists[1 + quad / group_quads];
        }
#pragma unroll
        for (uint32_t i = 0; i < wait_loads; ++i) {
            if (listed[i]) loaded[i] = mailbox.output(sequence, row)[first + i * wait_threads];
        }
    };
    uint2 fields{};
    if (is_there) {
        load(threadIdx.x);
        if (threadIdx.x == 0) fields = load_fields(mailbox.reply(sequence, row));
    }
    for (uint32_t head = threadIdx.x; head < heads; head += wait_threads) {
        const bool holds = is_there && lists[1 + head / args.geometry.group];
        lses[head] = holds ? mailbox.lse(sequence, row)[head] : -INFINITY;
    }
    __syncthreads();  // every thread has read `outcome`, which changes now
    if (threadIdx.x == 0) {
        if (is_there) outcome = outcome_of(fields, args.receipt->generation);
        args.served[row] = outcome == sh_row_served || outcome == sh_row_empty;
        atomicAdd(reinterpret_cast<unsigned long long*>(&args.state->outcomes[outcome]), 1ull);
        if (lists[0] != impossible_blocks) {
            atomicAdd(reinterpret_cast<unsigned long long*>(&args.state->blocks[outcome]),
                      static_cast<unsigned long long>(lists[0]));
        }
        if (is_asked && args.layer_waits) {
            auto* const longest = reinterpret_cast<unsigned long long*>(&args.layer_waits[args.receipt->layer]);
            atomicMax(longest, waited_ns ? static_cast<unsigned long long>(waited_ns) : 1ull);
        }
    }
    __syncthreads();

    const bool served = outcome == sh_row_served;
    for (uint32_t head = threadIdx.x; head < heads; head += wait_threads) {
        args.lse[uint64_t{row} * heads + head] = served ? lses[head] : -INFINITY;
    }
    for (uint32_t first = threadIdx.x; first < quads; first += wait_loads * wait_threads) {
        if (served && first != threadIdx.x) load(first);
#pragma unroll
        for (uint32_t i = 0; i < wait_loads; ++i) {
            const uint32_t quad = first + i * wait_threads;
            if (quad >= quads) continue;
            const bool holds = served && lses[quad / head_quads] != -INFINITY;  // else the worker did not write it
            out[quad] = holds ? loaded[i] : make_float4(0, 0, 0, 0);
        }
    }
}

// -- attaching ---------------------------------------------------------------------------------------------------------

// Replace the mailbox by that of another worker. The counts of steps and outcomes continue.
__global__ void attach_mailbox(sh_mailbox_state* state, uint64_t mailbox, uint64_t sequence) {
    state->mailbox = mailbox;
    state->sequence = sequence;
    state->late = 0;
    state->withheld = 0;
}

}  // namespace sglang_hybrid::cuda
