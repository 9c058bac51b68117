// Check of mailbox and engine under load, in one process, so that sanitizers see both sides:
//     engine_check [seconds]
// Posts random layers, mostly two at a time, and compares every reply with sh_attend_local, bit by bit. Some requests are out
// of bounds. Exits with 1 and a sentence if a check fails.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/flags.h"
#include "engine/mailbox_view.h"
#include "sglang_hybrid/c_api.h"

using namespace sglang_hybrid;

namespace {

constexpr uint64_t patience_ns = 20'000'000'000;
std::mt19937 random_bits(7);

uint32_t below(uint32_t limit) { return std::uniform_int_distribution<uint32_t>(0, limit - 1)(random_bits); }

void require(bool holds, const std::string& sentence) {
    if (holds) return;
    std::fprintf(stderr, "engine_check: %s\n", sentence.c_str());
    std::exit(1);
}

char* map(uint64_t bytes) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "no memory");
    return static_cast<char*>(memory);
}

struct Layer {
    std::vector<float> query;
    std::vector<int64_t> pages, fill;
    std::vector<int32_t> masks;
    std::vector<float> weights;
    sh_lists lists;
};

Layer random_layer(const Geometry& g) {
    Layer layer;
    const uint32_t rows = 1 + below(g.rows), listed = below(g.max_blocks + 1);
    layer.query.resize(uint64_t{rows} * g.kv_heads * g.group * g.head_dim);
    for (float& value : layer.query) value = float(below(2000)) / 1000 - 1;
    layer.pages.assign(uint64_t{rows} * g.kv_heads * listed, -1);
    layer.fill.assign(layer.pages.size(), 0);
    for (uint64_t list = 0; listed && list < uint64_t{rows} * g.kv_heads; ++list) {
        const uint32_t count = below(3) ? below(listed + 1) : 0;
        for (uint32_t i = 0; i < count; ++i) {
            layer.pages[list * listed + i] = below(g.pages);
            layer.fill[list * listed + i] = i + 1 == count ? 1 + below(block_tokens) : block_tokens;
        }
    }
    const bool summed = (g.flags & geometry_value_sums) && listed && below(3) == 0;
    layer.weights.resize(summed ? layer.pages.size() * g.group * block_tokens : 0);
    for (float& weight : layer.weights) weight = below(3) ? float(below(1000)) / 1000 : 0;
    const bool masked = (g.flags & geometry_masks) && below(3);
    layer.masks.resize(masked ? layer.pages.size() : 0);
    // all tokens, none, or random ones
    for (int32_t& mask : layer.masks) mask = below(3) ? below(4) ? int32_t(random_bits()) : 0 : -1;
    layer.lists = {layer.query.data(),
                   layer.pages.data(),
                   layer.fill.data(),
                   masked ? layer.masks.data() : nullptr,
                   summed ? layer.weights.data() : nullptr,
                   rows,
                   listed,
                   below(g.layers),
                   0.125f};
    return layer;
}

void check_reply(const Geometry& g, const char* pool, const Layer& layer, sh_client* client, uint64_t sequence,
                 uint32_t task_blocks) {
    const uint64_t lses = uint64_t{layer.lists.rows} * g.kv_heads * g.group;
    std::vector<float> out(lses * g.head_dim, 7.0f), lse(lses, 7.0f), want_out(out), want_lse(lse);
    std::vector<uint8_t> served(layer.lists.rows);
    const uint32_t missing =
        sh_client_collect(client, sequence, layer.lists.rows, patience_ns, nullptr, out.data(), lse.data(), served.data());
    require(missing == 0, "rows without a reply: " + std::to_string(missing));
    char error[sh_error_bytes];
    require(sh_attend_local(pool, &g, &layer.lists, task_blocks, 2, nullptr, want_out.data(), want_lse.data(), error) == 0,
            error);
    require(std::memcmp(out.data(), want_out.data(), out.size() * sizeof(float)) == 0, "the worker's output has other bits");
    require(std::memcmp(lse.data(), want_lse.data(), lse.size() * sizeof(float)) == 0, "the worker's LSE has other bits");
}

// Check that a post whose slot a newer one took is reported as overwritten, and that nothing else is written.
void check_overwritten(const Geometry& g, const Layer& layer, sh_client* client, uint64_t sequence) {
    const uint32_t rows = layer.lists.rows;
    const uint64_t lses = uint64_t{rows} * g.kv_heads * g.group;
    std::vector<float> out(lses * g.head_dim, 7.0f), lse(lses, 7.0f);
    const std::vector<float> out_before(out), lse_before(lse);
    std::vector<uint8_t> served(rows, sh_served);
    require(sh_client_collect(client, sequence, rows, patience_ns, nullptr, out.data(), lse.data(), served.data()) == rows,
            "an overwritten post was served");
    require(served == std::vector<uint8_t>(rows, sh_overwritten), "an overwritten post has another outcome");
    require(out == out_before && lse == lse_before, "something was written for an overwritten post");
}

// Check a client that gives up on posts and reuses their slots while the worker computes them: the last posts must be answered
// correctly, without anything from the older posts.
[[maybe_unused]] void check_given_up(const Geometry& g, const char* pool, sh_client* client, uint32_t task_blocks) {
    for (int time = 0; time < 100; ++time) {
        const Layer layers[4] = {random_layer(g), random_layer(g), random_layer(g), random_layer(g)};
        uint64_t sequences[4];
        char error[sh_error_bytes];
        for (int i = 0; i < 4; ++i)
            require(sh_client_post(client, &layers[i].lists, uint32_t(time), &sequences[i], error) == 0, error);
        for (int i = 0; i < 2; ++i) check_overwritten(g, layers[i], client, sequences[i]);
        for (int i = 2; i < 4; ++i) check_reply(g, pool, layers[i], client, sequences[i], task_blocks);
    }
}

// Check that the worker refuses what a damaged or malicious client could write: counts, fills and pages out of bounds, written
// directly into the mailbox.
void check_bounds(const Geometry& g, char* mailbox, sh_client* client) {
    const MailboxView view(mailbox, g);
    Layer layer = random_layer(g);
    layer.lists.rows = 1;
    layer.lists.listed = 0;
    for (const int damage : {0, 1, 2, 3}) {
        uint64_t sequence = 0;
        char error[sh_error_bytes];
        // an empty post first, to learn the next sequence number and to have the worker idle
        require(sh_client_post(client, &layer.lists, 1, &sequence, error) == 0, error);
        std::vector<float> out(view.output_row()), lse(view.lse_row());
        uint8_t served = 0;
        require(sh_client_collect(client, sequence, 1, patience_ns, nullptr, out.data(), lse.data(), &served) == 0, "no reply");
        const uint64_t next = sequence + 1;
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            view.lists(next, 0)[head] = {1, block_tokens};
            view.pages(next, 0, head)[0] = 0;
        }
        if (damage == 0) view.lists(next, 0)[0].count = g.max_blocks + 1;
        if (damage == 1) view.lists(next, 0)[0].last_fill = 33;
        if (damage == 2) view.pages(next, 0, 0)[0] = g.pages;
        view.request(next, 0) = {0, 5, damage == 3 ? 1000u : g.kv_heads};
        store_release(view.request(next, 0).sequence, next);
        Post& post = view.post(next);
        post.layer = 0;
        post.rows = 1;
        post.scale = 1;
        post.kind = uint32_t(PostKind::attend);
        store_release(post.sequence, next);
        store_ordered(view.bell().posted, next);
        wake_all(view.client().wake);
        const uint64_t deadline = now_ns() + patience_ns;
        while (load_acquire(view.reply(next, 0).sequence) != next) require(now_ns() < deadline, "no reply to a bad request");
        require(view.reply(next, 0).status == uint32_t(ReplyStatus::refused), "a request out of bounds was not refused");
        require(view.reply(next, 0).generation == 5, "a reply with another generation");
        // the client did not make that post: advance its sequence number
        require(sh_client_post(client, &layer.lists, 1, &sequence, error) == 0, error);
        require(sequence == next, "the client counts otherwise");
        require(sh_client_post(client, &layer.lists, 1, &sequence, error) == 0, error);
        require(sh_client_collect(client, sequence, 1, patience_ns, nullptr, out.data(), lse.data(), &served) == 0, "no reply");
    }
}

void run(Geometry g, uint32_t threads, uint32_t group_threads, uint32_t spin_us, double seconds, uint32_t task_blocks = 3) {
    const uint64_t block = uint64_t{block_tokens} * g.head_dim * sizeof(float);
    g.layer_stride = block * g.kv_heads * g.pages;
    g.keys = 0;
    g.values = g.layer_stride * g.layers;
    g.pool_bytes = 2 * g.values;
    char* const pool = map(g.pool_bytes);
    for (uint64_t i = 0; i < g.pool_bytes / sizeof(float); ++i) {
        reinterpret_cast<float*>(pool)[i] = float(below(2000)) / 1000 - 1;
    }
    const uint64_t bytes = layout_of(g).bytes;
    char* const mailbox = map(bytes);
    char error[sh_error_bytes];
    require(sh_mailbox_create(mailbox, bytes, &g, error) == 0, error);
    Geometry read{};
    require(sh_mailbox_check(mailbox, bytes, g.pool_bytes, &read, error) == 0, error);

    const sh_engine_options options{threads, group_threads, task_blocks, spin_us, nullptr, nullptr};
    sh_client* const client = sh_client_open(mailbox, &g, error);
    require(client, error);
    const uint64_t end = now_ns() + uint64_t(seconds * 1e9);
    uint64_t posts = 0;
    for (int life = 0; life < 3; ++life) {  // another engine may be started on the mailbox of a stopped one
        sh_engine* const engine = sh_engine_start(mailbox, pool, &read, &options, error);
        require(engine, error);
        while (posts < 50 || now_ns() < end - uint64_t((2 - life) * seconds / 3 * 1e9)) {
            const Layer first = random_layer(g), second = random_layer(g);
            uint64_t a = 0, b = 0;
            require(sh_client_post(client, &first.lists, uint32_t(posts), &a, error) == 0, error);
            require(sh_client_post(client, &second.lists, uint32_t(posts), &b, error) == 0, error);
            check_reply(g, pool, first, client, a, task_blocks);
            check_reply(g, pool, second, client, b, task_blocks);
            posts += 2;
        }
        sh_engine_stats stats{};
        sh_engine_read_stats(engine, &stats);
        require(stats.abandoned_posts == 0, "posts were abandoned");
#if !defined(__SANITIZE_THREAD__)  // this check reads and writes queries at the same time, on purpose
        if (life == 2) check_given_up(g, pool, client, task_blocks);
#endif
        if (life == 2) check_bounds(g, mailbox, client);
        sh_engine_stop(engine);
    }
    sh_client_close(client);
    munmap(mailbox, bytes);
    munmap(pool, g.pool_bytes);
    std::printf("%u threads in groups of %u, spinning %u us, lists of %u blocks: %llu posts\n", threads, group_threads, spin_us,
                g.max_blocks, static_cast<unsigned long long>(posts));
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
    const Geometry g{5, 2, 3, 64, uint32_t(DType::fp32), 9, 2, 40, 0, 0, 0, 0, 0};
    run(g, 1, 1, 0, seconds);
    run(g, 4, 2, 50, seconds);
    run(g, 3, 1, 1000, seconds);
    run(g, 4, 4, 0, seconds);
    const Geometry masked{5, 2, 3, 64, uint32_t(DType::fp32), 9, 2, 40, 0, 0, 0, 0, geometry_masks | geometry_value_sums};
    run(masked, 1, 1, 0, seconds);
    run(masked, 4, 2, 50, seconds);
    // enough tasks that threads claim several at once, and also tasks of the next post
    const Geometry many{60, 4, 3, 64, uint32_t(DType::fp32), 9, 2, 40, 0, 0, 0, 0, geometry_masks | geometry_value_sums};
    run(many, 4, 2, 50, seconds);
    // the longest lists do not make the most tasks: 64 blocks make more tasks than 65
    for (const auto [max_blocks, task_blocks] : {std::pair{65u, 1u}, std::pair{513u, 8u}, std::pair{625u, 8u}}) {
#if defined(__SANITIZE_THREAD__)
        if (max_blocks > 65) break;  // would take minutes, and the order of accesses does not depend on the length
#endif
        const Geometry longest{2, 2, 1, 64, uint32_t(DType::fp32), max_blocks, 2, 40, 0, 0, 0, 0, 0};
        run(longest, 4, 2, 50, seconds / 2, task_blocks);
    }
    return 0;
}
