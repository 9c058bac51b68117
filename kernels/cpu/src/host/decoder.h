// Decode attention on a host without a GPU. One call per layer stores the new tokens' keys and values, updates the digests and
// sketches of their pages, selects blocks if a context is longer than the budget, and attends to the blocks in place.
//
// Specification: policy `full` for contexts within the budget; for longer ones reference.select_blocks over
// reference.block_scores of the real query, and reference.attend_blocks over the selected blocks.
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

// Digests and sketches of one layer's blocks.
struct HostLayer {
    char* digests;                    // [page][KV head][2][head_dim], of the pool's dtype
    uint8_t* codes;                   // sketches [page][KV head][32][channels / 2], null without sketches
    std::vector<uint32_t> position;   // [KV head][channels]: index in a key of each channel of the sketches
};

// Rows of a tensor whose last dimensions are contiguous.
struct TensorRows {
    const char* data;
    uint64_t stride;  // bytes from one row to the next
};

class HostDecoder {
  public:
    HostDecoder(char* pool, const Geometry& geometry, std::vector<HostLayer> layers, uint32_t channels, float spread,
                const SelectionRules& rules, Kernel kernel, Threads threads);

    // Set and copy the rows of the following step, the same for all layers: pages [rows][stride], lengths [rows] in tokens
    // including the new ones, new_tokens [rows]. Returns what is wrong with the arguments, or an empty string.
    std::string begin(const int64_t* pages, uint32_t stride, const int64_t* lengths, const int64_t* new_tokens, uint32_t rows);
    // Store the new tokens of all rows. Rows of the tensors are the new tokens, one request after another.
    void store(uint32_t layer, TensorRows keys, TensorRows values);
    // Store one new token for each row, and attend. out: [rows][KV head][group][head_dim]
    void decode(uint32_t layer, TensorRows query, TensorRows keys, TensorRows values, float scale, float* out);
    // Update digests and sketches of `count` pages, of which the first filled[i] keys are valid. Returns what is wrong
    // with the arguments, or an empty string.
    std::string summarise(uint32_t layer, const int64_t* pages, const int64_t* filled, uint64_t count);

    const Geometry geometry;

  private:
    enum class Kind : uint32_t { store, score, select, attend };
    struct Task {
        Kind kind;
        uint32_t unit;  // index into units_
        uint32_t part;  // which of the unit's tasks of this kind
    };
    // One (row, KV head) of the step.
    struct Unit {
        uint32_t row, head;
        uint32_t blocks;    // blocks of the row
        uint32_t attended;  // number of blocks attended: all, or the budget
        Split split;        // of the attended blocks into tasks
        uint32_t score_tasks;     // 0 if all blocks are attended
        uint64_t first_part;      // index of the unit's first partial result
        uint64_t first_estimate;  // index into estimates_ of the unit's [group][blocks]
        uint64_t first_listed;    // index into listed_ of the unit's selected positions, which are replaced by pages
    };
    // The progress that tasks of a unit wait for, on a cache line per unit.
    struct alignas(64) Progress {
        std::atomic<uint32_t> stored, scores_left, listed, parts_left;
    };
    struct Layer;  // the arguments of one call of decode()

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
    const uint32_t row_bytes_;    // bytes of one head's key
    const uint32_t query_bytes_;  // bytes of the query heads of one KV head

    // state of the current step
    uint32_t rows_ = 0, stride_ = 0;
    std::vector<uint32_t> pages_, lengths_, new_tokens_;
    std::vector<uint64_t> first_token_;  // index of each row's first token among the new tokens
    std::vector<Unit> units_;
    std::vector<Task> tasks_;
    uint32_t useful_threads_ = 1;
    bool planned_ = false;

    // scratch memory of units
    std::unique_ptr<Progress[]> progress_;
    size_t progress_count_ = 0;
    std::vector<float> outs_, lses_, estimates_;
    std::vector<uint32_t> listed_;
    std::vector<char> queries_;
};

}  // namespace sglang_hybrid
