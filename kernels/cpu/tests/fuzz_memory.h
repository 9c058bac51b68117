// Memory for mailbox_fuzz in which every forbidden access ends the program: inaccessible pages lie in front of and behind each
// region, gaps between arrays are poisoned for the address sanitizer, and arrays that a side only reads are mapped read-only
// for that side.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "sglang_hybrid/mailbox.h"
#include "values.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sglang_hybrid {

using Range = std::pair<uint64_t, uint64_t>;  // first byte and end, from a region's start

// A mapping between two inaccessible pages.
class GuardedMapping {
  public:
    // Map a file, or private memory if `file` is -1. Private memory ends at the end of its last page.
    GuardedMapping(int file, uint64_t bytes) : bytes_(bytes), page_(uint64_t(sysconf(_SC_PAGESIZE))) {
        const uint64_t mapped = (bytes + page_ - 1) / page_ * page_;
        reserved_ = mapped + 2 * page_;
        base_ = static_cast<char*>(mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED) give_up();
        const int flags = MAP_FIXED | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
        void* const inner = mmap(base_ + page_, mapped, PROT_READ | PROT_WRITE, flags, file, 0);
        if (inner == MAP_FAILED) give_up();
        data = file < 0 ? base_ + page_ + mapped - bytes : base_ + page_;
    }
    ~GuardedMapping() {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(data, bytes_);
#endif
        munmap(base_, reserved_);
    }
    GuardedMapping(const GuardedMapping&) = delete;

    void make_read_only(Range range) {
        // with larger pages, arrays do not begin at page borders
        if (mailbox_alignment % page_) return;
        if (mprotect(data + range.first, range.second - range.first, PROT_READ)) give_up();
    }
    void make_read_only() {
        if (mprotect(base_ + page_, reserved_ - 2 * page_, PROT_READ)) give_up();
    }
    void poison([[maybe_unused]] Range range) {
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(data + range.first, range.second - range.first);
#endif
    }

    char* data;

  private:
    [[noreturn]] static void give_up() {
        std::perror("mailbox_fuzz: memory");
        std::exit(2);
    }

    uint64_t bytes_, page_, reserved_;
    char* base_;
};

// A mailbox as three processes would map it: the worker, the client, and an intruder (`anybody`) that may write anywhere.
class FuzzMailbox {
  public:
    explicit FuzzMailbox(const Geometry& g)
        : layout(layout_of(g)), file_(made(layout.bytes)), worker(file_, layout.bytes), client(file_, layout.bytes),
          anybody(file_, layout.bytes) {
        const uint64_t rows = uint64_t{mailbox_slots} * g.rows, heads = rows * g.kv_heads;
        const uint64_t values = heads * g.group * g.head_dim;
        const Range gaps[] = {
            {sizeof(Header), layout.bell},
            {layout.posts + mailbox_slots * sizeof(Post), layout.requests},
            {layout.requests + rows * sizeof(Request), layout.replies},
            {layout.replies + rows * sizeof(Reply), layout.checks},
            {layout.checks + rows * sizeof(uint64_t), layout.lists},
            {layout.lists + heads * sizeof(List), layout.pages},
            {layout.pages + heads * g.max_blocks * sizeof(uint32_t), layout.masks},
            {layout.masks + (g.flags & geometry_masks ? heads * g.max_blocks * sizeof(uint32_t) : 0), layout.queries},
            {layout.queries + values * query_bytes_of(static_cast<DType>(g.dtype)), layout.weights},
            {layout.weights + weight_bytes(g), layout.outputs},
            {layout.outputs + values * sizeof(float), layout.lses},
            {layout.lses + heads * g.group * sizeof(float), layout.bytes},
        };
        for (const Range& gap : gaps) {
            worker.poison(gap);
            client.poison(gap);
        }
        worker.make_read_only({0, layout.bell});
        worker.make_read_only({layout.requests, layout.replies});
        worker.make_read_only({layout.lists, layout.outputs});
        client.make_read_only({layout.outputs, layout.bytes});
    }
    ~FuzzMailbox() { close(file_); }
    FuzzMailbox(const FuzzMailbox&) = delete;

    const MailboxLayout layout;

    static uint64_t weight_bytes(const Geometry& g) {
        const uint64_t lists = uint64_t{mailbox_slots} * g.rows * g.kv_heads;
        return g.flags & geometry_value_sums ? lists * g.group * g.max_blocks * block_tokens * sizeof(float) : 0;
    }

  private:
    static int made(uint64_t bytes) {
        const int file = memfd_create("mailbox_fuzz", 0);
        if (file < 0 || ftruncate(file, off_t(bytes))) {
            std::perror("mailbox_fuzz: memory");
            std::exit(2);
        }
        return file;
    }

    const int file_;

  public:
    GuardedMapping worker, client, anybody;
};

// A read-only pool. Reads behind a layer's last page hit poisoned memory or the end of the pool.
class FuzzPool {
  public:
    // Return the geometry with its pool offsets filled in: `offset` bytes in front of all layers, `gap` pages between
    // layers.
    static Geometry with_pool(Geometry g, uint32_t gap, uint64_t offset) {
        const uint64_t layer = layer_bytes(g);
        g.layer_stride = layer + gap * (layer / g.pages);
        g.keys = offset;
        g.values = g.keys + g.layers * g.layer_stride;
        g.pool_bytes = g.values + (g.layers - 1) * g.layer_stride + layer;
        return g;
    }

    template <class Next>
    FuzzPool(const Geometry& g, Next next) : geometry_(g), memory_(-1, g.pool_bytes), values_(g.pool_bytes / size()) {
        const auto dtype = static_cast<DType>(g.dtype);
        for (uint64_t i = 0; i < values_.size(); ++i) {
            put(dtype, memory_.data + i * size(), next());
            values_[i] = get(dtype, memory_.data + i * size());
        }
        if (g.keys) memory_.poison({0, g.keys});
        for (const uint64_t first : {g.keys, g.values}) {
            for (uint32_t layer = 0; layer < g.layers; ++layer) {
                const uint64_t end = first + layer * g.layer_stride + layer_bytes(g);
                const bool is_last = first == g.values && layer + 1 == g.layers;
                if (!is_last) memory_.poison({end, first + (layer + 1) * g.layer_stride});
            }
        }
        memory_.make_read_only();
    }

    const char* data() const { return memory_.data; }

    // The head_dim numbers of one token's key (or value).
    const double* key(uint32_t layer, uint64_t page, uint32_t head, uint32_t token) const {
        return at(geometry_.keys, layer, page, head, token);
    }
    const double* value(uint32_t layer, uint64_t page, uint32_t head, uint32_t token) const {
        return at(geometry_.values, layer, page, head, token);
    }

  private:
    static uint64_t layer_bytes(const Geometry& g) {
        return uint64_t{g.pages} * g.kv_heads * block_tokens * g.head_dim * bytes_of(static_cast<DType>(g.dtype));
    }
    uint64_t size() const { return bytes_of(static_cast<DType>(geometry_.dtype)); }
    const double* at(uint64_t first, uint32_t layer, uint64_t page, uint32_t head, uint32_t token) const {
        const uint64_t row = ((page * geometry_.kv_heads + head) * block_tokens + token) * geometry_.head_dim;
        return values_.data() + (first + layer * geometry_.layer_stride) / size() + row;
    }

    const Geometry geometry_;
    GuardedMapping memory_;
    std::vector<double> values_;
};

}  // namespace sglang_hybrid
