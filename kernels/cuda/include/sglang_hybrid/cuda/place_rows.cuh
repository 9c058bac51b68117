// Which row has which place: an allocator that runs on the device, because the host does not know whose rows a batch has
// without waiting for the device.
#pragma once

#include "sglang_hybrid/cuda/dense_api.h"
#include "sglang_hybrid/cuda/memory.cuh"

namespace sglang_hybrid::cuda {

inline constexpr uint32_t place_threads = 512;
inline constexpr uint32_t most_places = 1024;

// One CTA. Rows that stay keep their places; of the others the first one gets the first place that is free.
__global__ void __launch_bounds__(place_threads) place_rows(const __grid_constant__ sh_place_rows args) {
    __shared__ uint32_t taken[most_places / 32];
    __shared__ int32_t new_places[most_places];
    __shared__ uint32_t new_count;
    const uint32_t active = active_of(args.step.active_rows, args.step.batch);
    const auto row_at = [&](uint32_t entry) {  // row 0 is that of padding, which several entries have
        const int32_t row = args.row_of[entry];
        return row > 0 && static_cast<uint32_t>(row) < args.rows ? row : -1;
    };
    const auto place_of = [&](int32_t row) {
        const int32_t place = args.places[row];
        return place >= 0 && static_cast<uint32_t>(place) < args.count && args.owners[place] == row ? place : -1;
    };
    for (uint32_t i = threadIdx.x; i < most_places / 32; i += place_threads) taken[i] = 0;
    __syncthreads();
    for (uint32_t entry = threadIdx.x; entry < active; entry += place_threads) {
        const int32_t row = row_at(entry), place = row < 0 ? -1 : place_of(row);
        if (place >= 0) atomicOr(&taken[place / 32], 1u << place % 32);
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // few rows are new in a step
        uint32_t found = 0, next = 0;
        for (uint32_t entry = 0; entry < active; ++entry) {
            const int32_t row = row_at(entry);
            if (row < 0 || place_of(row) >= 0) continue;
            while (next < args.count && taken[next / 32] >> next % 32 & 1) ++next;
            if (next == args.count) {
                if (args.refused) atomicAdd(reinterpret_cast<unsigned long long*>(args.refused), 1ull);
                continue;
            }
            args.owners[next] = row;
            args.places[row] = static_cast<int32_t>(next);
            args.first_lengths[next] = args.step.lengths[entry];
            new_places[found++] = static_cast<int32_t>(next++);
        }
        new_count = found;
    }
    __syncthreads();
    const uint32_t slots = new_count * args.place_slots;
    for (uint32_t layer = 0; layer < args.layers; ++layer) {
        int32_t* const of_layer = args.positions + uint64_t{layer} * args.count * args.place_slots;
        for (uint32_t i = threadIdx.x; i < slots; i += place_threads) {
            const auto place = static_cast<uint32_t>(new_places[i / args.place_slots]);
            of_layer[uint64_t{place} * args.place_slots + i % args.place_slots] = -1;
        }
    }
    for (uint32_t entry = threadIdx.x; entry < args.step.batch; entry += place_threads) {
        const int32_t row = entry < active ? row_at(entry) : -1, place = row < 0 ? -1 : place_of(row);
        bool is_new = false;
        for (uint32_t i = 0; i < new_count; ++i) is_new |= new_places[i] == place;
        args.row_of[entry] = place;
        args.begins[entry] = place >= 0 && is_new;
        if (place >= 0) args.lengths[place] = args.step.lengths[entry];
    }
}

}  // namespace sglang_hybrid::cuda
