// Decode attention on a host without a GPU: one call for each layer stores the new tokens' keys and values, summarises
// the pages they are in, selects blocks where a context is longer than the budget, and attends to them in place.
//
// Specification: policy `full` within the budget; beyond it reference.select_blocks over reference.block_scores of the
// real query, and reference.attend_blocks over what was selected.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/tasks.h"
#include "host/loops.h"
#include "host/select.h"
#include "host/threads.h"
#include "sglang_hybrid/mailbox.h"

namespace sglang_hybrid {

struct HostLayer {
    char* digests;                    // [page][KV head][2][head_dim], of the pool's dtype
    uint8_t* codes;                   // [page][KV head][32][channels / 2], null without sketches
    std::vector<uint32_t> position;   // [KV head][channels] of a sketch's channels in a key
};

// Rows of a tensor whose last dimensions are contiguous.
struct TensorRows {
    const char* data;
    uint64_t stride;  // bytes from a row to the next
};

class HostDecoder {
  public:
    HostDecoder(char* pool, const Geometry& geometry, std::vector<HostLayer> layers, uint32_t channels, float spread,
                const SelectionRules& rules, Kernel kernel, Threads threads);

    // The rows of the step that follows, the same for all layers: pages [rows][stride], tokens of each row with the new
    // ones, new ones. Copies them. Returns what is wrong with them, or nothing.
    std::string begin(const int64_t* pages, uint32_t stride, const int64_t* lengths, const int64_t* new_tokens, uint32_t rows);
    // Rows of tensors are the new tokens, one request's after the other's.
    void store(uint32_t layer, TensorRows keys, TensorRows values);
    // One new token for each row. out: [rows][KV head][group][head_dim]
    void decode(uint32_t layer, TensorRows query, TensorRows keys, TensorRows values, float scale, float* out);
    // Digests and sketches of pages whose first `filled` keys are valid.
    std::string summarise(uint32_t layer, const int64_t* pages, const int64_t* filled, uint64_t count);

    const Geometry geometry;

  private:
    enum class Kind : uint32_t { store, score, select, attend };
    struct Task {
        Kind kind;
        uint32_t unit;
        uint32_t part;
    };
    // One (row, KV head) of the step.
    struct Unit {
        uint32_t row, head;
        uint32_t blocks;    // of the row
        uint32_t attended;  // of them
        Split split;        // of those into tasks
        uint32_t score_tasks;
        uint64_t first_part;      // of its partial results
        uint64_t first_estimate;  // [group][blocks]
        uint64_t first_listed;    // selected positions, then pages
    };
    // What tasks of a unit wait for, one cache line each.
    struct alignas(64) Progress {
        std::atomic<uint32_t> stored, scores_left, listed, parts_left;
    };
    struct Layer;  // the arguments of decode()

    void plan();
    void run(const Task& task, const Layer& layer);
    void store_token(const Unit& unit, const Layer& layer);
    char* query_of(uint64_t unit);
    void score(const Unit& unit, uint32_t part, const Layer& layer);
    void select(const Unit& unit);
    void attend(uint32_t unit, uint32_t part, const Layer& layer);
    void store_block(uint32_t layer, uint32_t row, uint32_t block, uint32_t head, TensorRows keys, TensorRows values);
    void summarise_block(uint32_t layer, uint64_t page, uint32_t head, uint32_t filled);
    char* block_of(uint32_t layer, uint64_t start, uint64_t page, uint32_t head) const;
    char* digest_of(uint32_t layer, uint64_t page, uint32_t head) const;
    uint8_t* codes_of(uint32_t layer, uint64_t page, uint32_t head) const;
    uint32_t page_of(uint32_t row, uint32_t block) const { return pages_[uint64_t{row} * stride_ + block]; }
    uint32_t last_fill(uint32_t row, uint32_t blocks) const { return lengths_[row] - (blocks - 1) * block_tokens; }

    char* const pool_;
    const std::vector<HostLayer> layers_;
    const uint32_t channels_;
    const float spread_;
    const SelectionRules rules_;
    const Kernel kernel_;
    const HostLoops& loops_;
    const Threads threads_;
    const DType dtype_;
    const uint32_t row_bytes_;    // of one head's key
    const uint32_t query_bytes_;  // of the query heads of one KV head

    // the step
    uint32_t rows_ = 0, stride_ = 0;
    std::vector<uint32_t> pages_, lengths_, new_tokens_;
    std::vector<uint64_t> first_token_;  // of each row among the new tokens
    std::vector<Unit> units_;
    std::vector<Task> tasks_;
    uint32_t useful_threads_ = 1;
    bool planned_ = false;

    // scratch, by unit
    std::unique_ptr<Progress[]> progress_;
    size_t progress_count_ = 0;
    std::vector<float> outs_, lses_, estimates_;
    std::vector<uint32_t> listed_;
    std::vector<char> queries_;
};

}  // namespace sglang_hybrid
