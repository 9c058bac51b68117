#include "host/decoder.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace sglang_hybrid {
namespace {

constexpr uint32_t attend_blocks_of_task = 16;
constexpr uint32_t score_blocks_of_task = 64;
// Work that justifies one more thread, in attended blocks; scoring four blocks takes about as long as attending one.
constexpr uint64_t blocks_per_thread = 48;
constexpr uint32_t scored_per_attended = 4;

// Wait for another thread's task. That thread has already begun the task, since tasks are taken in order and wait only for
// earlier ones.
template <class Condition>
void wait_until(Condition condition) {
    for (uint32_t spins = 0; !condition(); ++spins) {
        if (spins > 100) sched_yield();
    }
}

uint32_t blocks_of(uint32_t tokens) { return (tokens + block_tokens - 1) / block_tokens; }

char* aligned(char* memory) { return memory + (-reinterpret_cast<uintptr_t>(memory) & 63); }

}  // namespace

struct HostDecoder::Layer {
    uint32_t number;
    TensorRows query, keys, values;
    float scale;
    float* out;
};

HostDecoder::HostDecoder(char* pool, const Geometry& g, std::vector<HostLayer> layers, uint32_t channels, float spread,
                         const SelectionRules& rules, Kernel kernel, Threads threads)
    : geometry(g), pool_(pool), layers_(std::move(layers)), channels_(channels), spread_(spread), rules_(rules),
      kernel_(kernel), loops_(host_loops()), threads_(threads), dtype_(static_cast<DType>(g.dtype)),
      row_bytes_(g.head_dim * bytes_of(dtype_)), query_bytes_(g.group * g.head_dim * query_bytes_of(dtype_)) {}

// -- the step ----------------------------------------------------------------------------------------------------------

std::string HostDecoder::begin(const int64_t* pages, uint32_t stride, const int64_t* lengths, const int64_t* new_tokens,
                               uint32_t rows) {
    rows_ = 0;
    planned_ = false;
    pages_.assign(uint64_t{rows} * stride, 0);
    lengths_.resize(rows);
    new_tokens_.resize(rows);
    first_token_.resize(rows);
    uint64_t tokens = 0;
    for (uint32_t row = 0; row < rows; ++row) {
        if (lengths[row] < 1 || lengths[row] > int64_t{stride} * block_tokens) return "a row has more tokens than pages";
        if (new_tokens[row] < 0 || new_tokens[row] > lengths[row]) return "a row has more new tokens than tokens";
        lengths_[row] = static_cast<uint32_t>(lengths[row]);
        new_tokens_[row] = static_cast<uint32_t>(new_tokens[row]);
        first_token_[row] = tokens;
        tokens += new_tokens_[row];
        for (uint32_t block = 0; block < blocks_of(lengths_[row]); ++block) {
            const int64_t page = pages[uint64_t{row} * stride + block];
            if (page < 0 || page >= geometry.pages) return "page " + std::to_string(page) + " is not in the pool";
            pages_[uint64_t{row} * stride + block] = static_cast<uint32_t>(page);
        }
    }
    rows_ = rows;
    stride_ = stride;
    return {};
}

// Divide the step into units and tasks. Both depend on the rows' lengths alone, so that results do not depend on the number of
// threads or on the other rows of a batch.
void HostDecoder::plan() {
    const Geometry& g = geometry;
    units_.clear();
    tasks_.clear();
    uint64_t parts = 0, estimates = 0, listed = 0, attended = 0, scored = 0;
    for (uint32_t row = 0; row < rows_; ++row) {
        const uint32_t blocks = blocks_of(lengths_[row]);
        const bool selects = blocks > rules_.limit;
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            Unit unit{row, head, blocks, selects ? rules_.limit : blocks, {}, 0, parts, estimates, listed};
            unit.split = split_list(unit.attended, attend_blocks_of_task);
            parts += unit.split.tasks;
            attended += unit.attended;
            if (selects) {
                unit.score_tasks = (blocks + score_blocks_of_task - 1) / score_blocks_of_task;
                estimates += uint64_t{g.group} * blocks;
                listed += unit.attended;
                scored += blocks;
            }
            units_.push_back(unit);
        }
    }
    const auto each_unit = [&](Kind kind, auto count) {
        for (uint32_t unit = 0; unit < units_.size(); ++unit) {
            for (uint32_t part = 0; part < count(units_[unit]); ++part) tasks_.push_back({kind, unit, part});
        }
    };
    each_unit(Kind::store, [](const Unit&) { return 1u; });
    each_unit(Kind::score, [](const Unit& unit) { return unit.score_tasks; });
    each_unit(Kind::select, [](const Unit& unit) { return unit.score_tasks ? 1u : 0u; });
    each_unit(Kind::attend, [](const Unit& unit) { return unit.split.tasks; });

    if (progress_count_ < units_.size()) {
        progress_count_ = units_.size();
        progress_ = std::make_unique<Progress[]>(progress_count_);
    }
    outs_.resize(std::max<size_t>(outs_.size(), parts * partial_out_floats(g)));
    lses_.resize(std::max<size_t>(lses_.size(), (parts + units_.size()) * g.group));
    estimates_.resize(std::max<size_t>(estimates_.size(), estimates));
    listed_.resize(std::max<size_t>(listed_.size(), listed));
    queries_.resize(std::max<size_t>(queries_.size(), units_.size() * query_bytes_ + 64));
    const uint64_t work = attended + scored / scored_per_attended;
    useful_threads_ =
        static_cast<uint32_t>(std::min<uint64_t>({threads_.count(), units_.size() * 4, 1 + work / blocks_per_thread}));
    planned_ = true;
}

// -- storing -----------------------------------------------------------------------------------------------------------

char* HostDecoder::block_of(uint32_t layer, uint64_t start, uint64_t page, uint32_t head) const {
    const uint64_t block = uint64_t{block_tokens} * row_bytes_;
    return pool_ + start + layer * geometry.layer_stride + (page * geometry.kv_heads + head) * block;
}

char* HostDecoder::digest_of(uint32_t layer, uint64_t page, uint32_t head) const {
    return layers_[layer].digests + (page * geometry.kv_heads + head) * 2 * row_bytes_;
}

uint8_t* HostDecoder::codes_of(uint32_t layer, uint64_t page, uint32_t head) const {
    uint8_t* const codes = layers_[layer].codes;
    return codes ? codes + (page * geometry.kv_heads + head) * block_tokens * channels_ / 2 : nullptr;
}

void HostDecoder::summarise_block(uint32_t layer, uint64_t page, uint32_t head, uint32_t filled) {
    const char* const keys = block_of(layer, geometry.keys, page, head);
    char* const digest = digest_of(layer, page, head);
    loops_.digest(dtype_, keys, filled, geometry.head_dim, digest);
    if (uint8_t* const codes = codes_of(layer, page, head)) {
        const uint32_t* const position = layers_[layer].position.data() + head * channels_;
        loops_.codes(dtype_, keys, digest, position, channels_, geometry.head_dim, codes);
    }
}

// Store the new tokens of one block, and update the block's digest and sketch.
void HostDecoder::store_block(uint32_t layer, uint32_t row, uint32_t block, uint32_t head, TensorRows keys, TensorRows values) {
    const uint32_t length = lengths_[row], before = length - new_tokens_[row];
    const uint32_t first = std::max(before, block * block_tokens), end = std::min(length, (block + 1) * block_tokens);
    const uint64_t page = page_of(row, block);
    char* const to_keys = block_of(layer, geometry.keys, page, head);
    char* const to_values = block_of(layer, geometry.values, page, head);
    for (uint32_t token = first; token < end; ++token) {
        const uint64_t from = first_token_[row] + token - before, at = uint64_t{token % block_tokens} * row_bytes_;
        std::memcpy(to_keys + at, keys.data + from * keys.stride + uint64_t{head} * row_bytes_, row_bytes_);
        std::memcpy(to_values + at, values.data + from * values.stride + uint64_t{head} * row_bytes_, row_bytes_);
    }
    summarise_block(layer, page, head, end - block * block_tokens);
}

void HostDecoder::store(uint32_t layer, TensorRows keys, TensorRows values) {
    struct Piece {
        uint32_t row, block;
    };
    std::vector<Piece> pieces;
    for (uint32_t row = 0; row < rows_; ++row) {
        if (new_tokens_[row] == 0) continue;
        const uint32_t first = (lengths_[row] - new_tokens_[row]) / block_tokens;
        for (uint32_t block = first; block < blocks_of(lengths_[row]); ++block) pieces.push_back({row, block});
    }
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < pieces.size();) {
            for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
                store_block(layer, pieces[i].row, pieces[i].block, head, keys, values);
            }
        }
    };
    threads_.run(static_cast<uint32_t>(std::min<size_t>(threads_.count(), 1 + pieces.size() / 8)), work);
}

std::string HostDecoder::summarise(uint32_t layer, const int64_t* pages, const int64_t* filled, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        if (pages[i] < 0 || pages[i] >= geometry.pages) return "page " + std::to_string(pages[i]) + " is not in the pool";
        if (filled[i] < 1 || filled[i] > block_tokens) return "a page must have 1 to 32 tokens";
    }
    std::atomic<uint64_t> next{0};
    auto work = [&] {
        for (uint64_t i; (i = next.fetch_add(1)) < count;) {
            for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
                summarise_block(layer, static_cast<uint64_t>(pages[i]), head, static_cast<uint32_t>(filled[i]));
            }
        }
    };
    threads_.run(static_cast<uint32_t>(std::min<uint64_t>(threads_.count(), 1 + count / 8)), work);
    return {};
}

// -- one layer of a decode step ----------------------------------------------------------------------------------------

void HostDecoder::decode(uint32_t number, TensorRows query, TensorRows keys, TensorRows values, float scale, float* out) {
    if (!planned_) plan();
    const Layer layer{number, query, keys, values, scale, out};
    for (size_t unit = 0; unit < units_.size(); ++unit) {
        Progress& progress = progress_[unit];
        progress.stored.store(0, std::memory_order_relaxed);
        progress.scores_left.store(units_[unit].score_tasks, std::memory_order_relaxed);
        progress.listed.store(0, std::memory_order_relaxed);
        progress.parts_left.store(units_[unit].split.tasks, std::memory_order_relaxed);
    }
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < tasks_.size();) run(tasks_[i], layer);
    };
    threads_.run(useful_threads_, work);
}

void HostDecoder::run(const Task& task, const Layer& layer) {
    const Unit& unit = units_[task.unit];
    Progress& progress = progress_[task.unit];
    switch (task.kind) {
        case Kind::store:
            store_token(unit, layer);
            progress.stored.store(1, std::memory_order_release);
            return;
        case Kind::score:
            wait_until([&] { return progress.stored.load(std::memory_order_acquire) != 0; });
            score(unit, task.part, layer);
            progress.scores_left.fetch_sub(1, std::memory_order_acq_rel);
            return;
        case Kind::select:
            wait_until([&] { return progress.scores_left.load(std::memory_order_acquire) == 0; });
            select(unit);
            progress.listed.store(1, std::memory_order_release);
            return;
        case Kind::attend: {
            std::atomic<uint32_t>& ready = unit.score_tasks ? progress.listed : progress.stored;
            wait_until([&] { return ready.load(std::memory_order_acquire) != 0; });
            attend(task.unit, task.part, layer);
            return;
        }
    }
}

void HostDecoder::store_token(const Unit& unit, const Layer& layer) {
    const uint32_t index = static_cast<uint32_t>(&unit - units_.data());
    store_block(layer.number, unit.row, unit.blocks - 1, unit.head, layer.keys, layer.values);
    const char* const from = layer.query.data + unit.row * layer.query.stride + uint64_t{unit.head} * query_bytes_;
    std::memcpy(query_of(index), from, query_bytes_);
}

char* HostDecoder::query_of(uint64_t unit) { return aligned(queries_.data()) + unit * query_bytes_; }

void HostDecoder::score(const Unit& unit, uint32_t part, const Layer& layer) {
    const Geometry& g = geometry;
    const uint32_t dim = g.head_dim, index = static_cast<uint32_t>(&unit - units_.data());
    alignas(64) float query[max_group * max_head_dim], other[max_group * max_head_dim];
    uint32_t position[max_head_dim];
    loops_.to_floats(query_dtype(dtype_), query_of(index), g.group * dim, query);
    const bool sketched = layers_[layer.number].codes != nullptr;
    if (sketched) {
        const uint32_t* const chosen = layers_[layer.number].position.data() + unit.head * channels_;
        for (uint32_t c = 0; c < channels_; ++c) position[c % 2 * (channels_ / 2) + c / 2] = chosen[c];
        for (uint32_t head = 0; head < g.group; ++head) {
            for (uint32_t c = 0; c < channels_; ++c) {
                other[head * channels_ + c] = query[head * dim + position[c]] * layer.scale;
            }
        }
    } else {
        const float toward = (1 + spread_) / 2, away = (1 - spread_) / 2;
        for (uint32_t i = 0; i < g.group * dim; ++i) {
            const float up = std::max(query[i], 0.0f), down = std::min(query[i], 0.0f);
            query[i] = toward * up + away * down;
            other[i] = away * up + toward * down;
        }
    }
    const EstimateQuery prepared{dtype_, g.group, dim, channels_, layer.scale, query, other, other, position};
    float estimates[max_group];
    const uint32_t end = std::min(unit.blocks, (part + 1) * score_blocks_of_task);
    for (uint32_t block = part * score_blocks_of_task; block < end; ++block) {
        const uint64_t page = page_of(unit.row, block);
        loops_.estimate(prepared, digest_of(layer.number, page, unit.head), codes_of(layer.number, page, unit.head), estimates);
        // the tail gets no estimate: see without_tail in reference.py
        const bool is_tail = block + 1 == unit.blocks;
        for (uint32_t head = 0; head < g.group; ++head) {
            estimates_[unit.first_estimate + uint64_t{head} * unit.blocks + block] =
                is_tail ? -std::numeric_limits<float>::infinity() : estimates[head];
        }
    }
}

void HostDecoder::select(const Unit& unit) {
    uint32_t* const listed = listed_.data() + unit.first_listed;
    select_blocks(estimates_.data() + unit.first_estimate, geometry.group, unit.blocks, rules_, listed);
    for (uint32_t i = 0; i < unit.attended; ++i) listed[i] = page_of(unit.row, listed[i]);
}

void HostDecoder::attend(uint32_t index, uint32_t part, const Layer& layer) {
    const Geometry& g = geometry;
    const Unit& unit = units_[index];
    const bool whole = unit.split.tasks == 1;
    const uint32_t first = part * unit.split.size;
    const uint64_t floats = partial_out_floats(g), to_part = unit.first_part + part;
    float* const out = layer.out + (uint64_t{unit.row} * g.kv_heads + unit.head) * floats;
    float* const unit_lse = lses_.data() + index * g.group;
    float* const lses = lses_.data() + units_.size() * g.group;
    BlockAttention task = attention_of(g, pool_, layer.number, unit.head, query_of(index), layer.scale);
    task.pages = (unit.score_tasks ? listed_.data() + unit.first_listed : &pages_[uint64_t{unit.row} * stride_]) + first;
    task.count = std::min(unit.split.size, unit.attended - first);
    task.last_fill = part + 1 == unit.split.tasks ? last_fill(unit.row, unit.blocks) : block_tokens;
    task.out = whole ? out : outs_.data() + to_part * floats;
    task.lse = whole ? unit_lse : lses + to_part * g.group;
    kernel_(task);
    if (progress_[index].parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && !whole) {
        const Partials parts{outs_.data() + unit.first_part * floats, lses + unit.first_part * g.group};
        merge_partials(g, parts, unit.split.tasks, out, unit_lse);
    }
}

}  // namespace sglang_hybrid
