// Fuzz test of an engine and a client while an intruder writes into their shared memory:
//     mailbox_fuzz SEED SECONDS [FIRST_ROUND]
// A round first checks random geometries and headers. Then it runs an engine and a client of a random shape against random
// writes. Last, an engine answers posts on a fresh mailbox with the same pool, and the answers are compared with softmax
// attention in fp64. A round's actions depend only on the seed and the round's number, except for the timing of threads.
// Prints one line, or exits with 1 and a sentence if a check fails. The address sanitizer sees every access: see
// fuzz_memory.h.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/flags.h"
#include "engine/mailbox_view.h"
#include "engine/post_reader.h"
#include "fuzz_memory.h"
#include "sglang_hybrid/c_api.h"
#include "values.h"

using namespace sglang_hybrid;

namespace {

constexpr float scale = 0.125f;
constexpr uint64_t patience_ns = 30'000'000'000;  // an action that takes longer counts as hanging: all should take a second

uint64_t seed = 0;
std::atomic<uint64_t> round_number{0};
std::atomic<uint64_t> hostile_writes{0}, answered_posts{0}, checked_posts{0}, engines{0};

[[noreturn]] void fail(const std::string& sentence) {
    std::fprintf(stderr, "mailbox_fuzz: seed %" PRIu64 ", round %" PRIu64 ": %s\n", seed, round_number.load(),
                 sentence.c_str());
    std::_Exit(1);
}

void require(bool holds, const std::string& sentence) {
    if (!holds) fail(sentence);
}

void sleep_us(uint32_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// -- actions that must end --------------------------------------------------------------------------------------------

struct Limit;
std::mutex limits_lock;
std::list<const Limit*> limits;

// The time limit of an action: the program fails if the object exists for longer than patience_ns.
struct Limit {
    explicit Limit(const char* what) : what(what), deadline(now_ns() + patience_ns) {
        const std::lock_guard<std::mutex> lock(limits_lock);
        limits.push_back(this);
    }
    ~Limit() {
        const std::lock_guard<std::mutex> lock(limits_lock);
        limits.remove(this);
    }
    Limit(const Limit&) = delete;

    const char* const what;
    const uint64_t deadline;
};

void watch_limits() {
    for (;; sleep_us(100'000)) {
        const std::lock_guard<std::mutex> lock(limits_lock);
        for (const Limit* limit : limits) {
            if (now_ns() > limit->deadline) fail(std::string(limit->what) + " does not end");
        }
    }
}

// -- choices ----------------------------------------------------------------------------------------------------------

class Random {
  public:
    Random(uint64_t number, uint32_t role) {
        std::seed_seq sequence{uint32_t(seed), uint32_t(seed >> 32), uint32_t(number), uint32_t(number >> 32), role};
        bits_.seed(sequence);
    }

    uint64_t bits() { return bits_(); }
    uint32_t below(uint64_t limit) { return uint32_t(bits_() % limit); }
    bool once_in(uint32_t times) { return below(times) == 0; }
    float value() { return float(below(2000)) / 1000 - 1; }
    template <class T, size_t n>
    T one_of(const T (&choices)[n]) {
        return choices[below(n)];
    }

    // Return a replacement for a field's value `now`: a value near a limit of integers or near `now`, or random bits.
    uint64_t hostile_word(uint64_t now) {
        switch (below(9)) {
            case 0: return below(4);
            case 1: return ~uint64_t{0} - below(4);
            case 2: return (uint64_t{1} << 63) - 2 + below(4);
            case 3: return (uint64_t{1} << 32) - 2 + below(4);
            case 4: return (uint64_t{1} << 31) - 2 + below(4);
            case 5: return now + below(7) - 3;
            case 6: return now ^ uint64_t{1} << below(64);
            case 7: return uint64_t{1} << below(64);
            default: return bits();
        }
    }

  private:
    std::mt19937_64 bits_;
};

struct Setup {
    Geometry geometry;
    sh_engine_options options;
};

Geometry random_geometry(Random& random) {
    const bool is_long = random.once_in(12);
    Geometry g{};
    g.rows = 1 + random.below(is_long ? 2 : 6);
    g.kv_heads = 1 + random.below(is_long ? 2 : 3);
    g.group = is_long ? 1 : random.one_of({1u, 1u, 2u, 3u, 5u, 16u});
    g.head_dim = is_long ? 64 : random.one_of({64u, 64u, 64u, 96u, 128u, 256u});
    g.dtype = random.below(1 + uint32_t(last_dtype));
    g.max_blocks = is_long ? 513 : random.once_in(4) ? 62 + random.below(4) : 1 + random.below(9);
    g.layers = 1 + random.below(3);
    g.pages = 1 + random.below(12);
    g.flags = random.below(1 + known_geometry_flags);
    return FuzzPool::with_pool(g, random.below(2), 64 * random.below(3));
}

Setup random_setup(Random& random) {
    Setup setup{random_geometry(random), {}};
    sh_engine_options& options = setup.options;
    options.threads = random.once_in(6) ? 0 : 1 + random.below(3);  // 0: this program takes and answers posts
    options.group_threads = 1 + random.below(std::max(options.threads, 1u));
    options.task_blocks = random.one_of({1u, 1u, 2u, 3u, 8u, 64u, ~0u});
    options.spin_us = random.one_of({0u, 50u, 1000u});
    // the sanitizer does not check the loads of some vector instructions, so half the rounds use `portable`
    options.variant = random.once_in(2) ? "portable" : nullptr;
    return setup;
}

// -- geometries and headers -------------------------------------------------------------------------------------------

// Check what a geometry without problems guarantees, in integers that do not overflow.
void require_servable(const Geometry& g) {
    using Wide = unsigned __int128;
    require(g.rows && g.kv_heads && g.group && g.head_dim, "a geometry with a zero");
    require(g.max_blocks && g.layers && g.pages, "a geometry with a zero");
    require((g.flags & ~known_geometry_flags) == 0, "a geometry with a flag that nobody knows");
    require(g.group <= max_group && g.head_dim <= max_head_dim && g.dtype <= uint32_t(last_dtype),
            "a geometry that no kernel has");
    const Wide item = bytes_of(static_cast<DType>(g.dtype));
    const Wide layer = Wide{block_tokens} * g.head_dim * item * g.kv_heads * g.pages;
    for (const uint64_t first : {g.keys, g.values}) {
        require(first + Wide{g.layers - 1} * g.layer_stride + layer <= g.pool_bytes, "a layer behind the pool's end");
    }
    const MailboxLayout at = layout_of(g);
    const Wide rows = Wide{mailbox_slots} * g.rows, heads = rows * g.kv_heads, values = heads * g.group * g.head_dim;
    const std::pair<Wide, Wide> parts[] = {
        {0, sizeof(Header)},
        {at.bell, sizeof(Bell)},
        {at.worker, sizeof(WorkerLine)},
        {at.client, sizeof(ClientLine)},
        {at.posts, mailbox_slots * sizeof(Post)},
        {at.requests, rows * sizeof(Request)},
        {at.replies, rows * sizeof(Reply)},
        {at.checks, rows * sizeof(uint64_t)},
        {at.lists, heads * sizeof(List)},
        {at.pages, heads * g.max_blocks * sizeof(uint32_t)},
        {at.masks, g.flags & geometry_masks ? heads * g.max_blocks * sizeof(uint32_t) : 0},
        {at.queries, values * query_bytes_of(static_cast<DType>(g.dtype))},
        {at.weights, g.flags & geometry_value_sums ? heads * g.group * g.max_blocks * block_tokens * sizeof(float) : 0},
        {at.outputs, values * sizeof(float)},
        {at.lses, heads * g.group * sizeof(float)},
        {at.bytes, 0},
    };
    for (size_t i = 1; i < std::size(parts); ++i) {
        require(parts[i - 1].first + parts[i - 1].second <= parts[i].first, "parts of a mailbox overlap");
    }
}

Geometry hostile_geometry(Random& random) {
    Geometry g = random_geometry(random);
    uint32_t* const small[] = {&g.rows, &g.kv_heads, &g.group, &g.head_dim, &g.dtype, &g.max_blocks, &g.layers, &g.pages};
    uint64_t* const large[] = {&g.keys, &g.values, &g.layer_stride, &g.pool_bytes, &g.flags};
    // often a huge pool: most values of the other fields would be refused because of a small pool alone
    if (random.once_in(2)) g.pool_bytes = ~uint64_t{0} >> random.below(16);
    if (random.once_in(2)) g.layer_stride = uint64_t{64} << random.below(58);
    for (uint32_t changes = random.below(4); changes; --changes) {
        if (random.once_in(2)) {
            uint32_t& field = *small[random.below(std::size(small))];
            field = uint32_t(random.once_in(2) ? random.below(300) : random.hostile_word(field));
        } else {
            uint64_t& field = *large[random.below(std::size(large))];
            field = random.hostile_word(field) & (random.once_in(2) ? ~uint64_t{63} : ~uint64_t{0});
        }
    }
    return g;
}

void check_header(Random& random, const Geometry& g) {
    Header header{mailbox_magic, mailbox_version, sizeof(Header), layout_of(g).bytes, g};
    for (uint32_t flips = random.below(3); flips; --flips) {
        const uint32_t bit = random.below(8 * sizeof(header));
        reinterpret_cast<char*>(&header)[bit / 8] ^= char(1 << bit % 8);
    }
    const uint64_t bytes = random.once_in(4)   ? random.below(sizeof(header) + 2)
                           : random.once_in(4) ? random.hostile_word(header.mailbox_bytes)
                                               : header.mailbox_bytes;
    const uint64_t pool_bytes = random.once_in(8) ? random.hostile_word(g.pool_bytes) : header.geometry.pool_bytes;
    // memory of exactly the right size, so that the sanitizer sees reads beyond it
    std::vector<char> mailbox(std::min<uint64_t>(bytes, sizeof(header)));
    std::copy_n(reinterpret_cast<char*>(&header), mailbox.size(), mailbox.begin());
    std::vector<char> error(sh_error_bytes, 'x');
    Geometry found{};
    if (sh_mailbox_check(mailbox.data(), bytes, pool_bytes, &found, error.data())) {
        require(std::memchr(error.data(), 0, error.size()), "a refusal without an end");
        return;
    }
    require_servable(found);
    require(layout_of(found).bytes <= bytes && found.pool_bytes == pool_bytes, "a mailbox or pool that is too small");
}

void check_geometries(Random& random) {
    for (int time = 0; time < 100; ++time) {
        const Geometry good = random_geometry(random);
        const char* const problem = problem_of(good);
        require(!problem, "a good geometry is refused: " + std::string(problem ? problem : ""));
        require_servable(good);
        check_header(random, good);
        const Geometry bad = hostile_geometry(random);
        if (problem_of(bad)) continue;
        require_servable(bad);
        check_header(random, bad);
    }
}

// -- posts and their answers ------------------------------------------------------------------------------------------

struct Layer {
    std::vector<char> query;
    std::vector<int64_t> pages, fill;
    std::vector<int32_t> masks;  // may be empty
    std::vector<float> weights;  // may be empty
    sh_lists lists;
};

Layer random_layer(const Geometry& g, Random& random) {
    Layer layer;
    const auto dtype = query_dtype(static_cast<DType>(g.dtype));
    const uint32_t rows = 1 + random.below(g.rows), listed = random.below(g.max_blocks + 1);
    const uint64_t values = uint64_t{rows} * g.kv_heads * g.group * g.head_dim;
    layer.query.resize(values * bytes_of(dtype));
    for (uint64_t i = 0; i < values; ++i) put(dtype, layer.query.data() + i * bytes_of(dtype), random.value());
    layer.pages.assign(uint64_t{rows} * g.kv_heads * listed, -1);
    layer.fill.assign(layer.pages.size(), 0);
    for (uint64_t list = 0; listed && list < uint64_t{rows} * g.kv_heads; ++list) {
        const uint32_t count = random.once_in(3) ? 0 : random.below(listed + 1);
        for (uint32_t i = 0; i < count; ++i) {
            layer.pages[list * listed + i] = random.below(g.pages);
            layer.fill[list * listed + i] = i + 1 == count ? 1 + random.below(block_tokens) : block_tokens;
        }
    }
    const uint32_t which = random.below(g.layers);
    const bool summed = (g.flags & geometry_value_sums) && listed && random.once_in(2);
    if (summed) layer.weights.resize(layer.pages.size() * g.group * block_tokens);
    for (float& weight : layer.weights) weight = random.once_in(3) ? 0 : random.value();
    const bool masked = (g.flags & geometry_masks) && random.once_in(2);
    if (masked) layer.masks.resize(layer.pages.size());
    for (int32_t& mask : layer.masks) mask = int32_t(random.once_in(4) ? random.one_of({0u, ~0u}) : uint32_t(random.bits()));
    layer.lists = {layer.query.data(),
                   layer.pages.data(),
                   layer.fill.data(),
                   masked ? layer.masks.data() : nullptr,
                   summed ? layer.weights.data() : nullptr,
                   rows,
                   listed,
                   which,
                   scale};
    return layer;
}

struct Answer {
    explicit Answer(const Geometry& g, uint32_t rows)
        : lse(uint64_t{rows} * g.kv_heads * g.group, untouched), out(lse.size() * g.head_dim, untouched), served(rows, 99) {}
    static constexpr float untouched = 7;
    std::vector<float> lse, out;
    std::vector<uint8_t> served;
};

uint64_t post(sh_client* client, const Layer& layer, uint32_t generation) {
    uint64_t sequence = 0;
    char error[sh_error_bytes];
    const Limit limit("posting");
    require(sh_client_post(client, &layer.lists, generation, &sequence, error) == 0, error);
    return sequence;
}

// Collect a post's answers. Returns the number of rows that are not served.
uint32_t collect(sh_client* client, uint64_t sequence, uint64_t timeout_ns, Answer& answer) {
    const Limit limit("collecting");
    const uint32_t missing = sh_client_collect(client, sequence, uint32_t(answer.served.size()), timeout_ns, nullptr,
                                               answer.out.data(), answer.lse.data(), answer.served.data());
    uint32_t counted = 0;
    for (const uint8_t outcome : answer.served) {
        require(outcome <= sh_overwritten, "an outcome that there is not");
        counted += outcome != sh_served;
    }
    require(counted == missing, "another number of missing rows than there are");
    return missing;
}

// Check the sum of values of one query head.
void check_sum(const Geometry& g, const FuzzPool& pool, const Layer& layer, uint64_t list, uint32_t query_head,
               const Answer& answer) {
    const uint64_t index = list * g.group + query_head;
    const float* const out = answer.out.data() + index * g.head_dim;
    std::vector<double> sum(g.head_dim), sizes(g.head_dim);
    uint32_t blocks = 0;
    for (; blocks < layer.lists.listed && layer.pages[list * layer.lists.listed + blocks] >= 0; ++blocks) {
        const auto page = uint64_t(layer.pages[list * layer.lists.listed + blocks]);
        for (uint32_t token = 0; token < block_tokens; ++token) {
            const double weight = layer.weights[(index * layer.lists.listed + blocks) * block_tokens + token];
            const double* const value = pool.value(layer.lists.layer, page, uint32_t(list % g.kv_heads), token);
            for (uint32_t d = 0; d < g.head_dim; ++d) {
                sum.data()[d] += weight * value[d];
                sizes.data()[d] += std::fabs(weight * value[d]);
            }
        }
    }
    if (blocks == 0) {
        require(answer.lse[index] == -std::numeric_limits<float>::infinity(), "the LSE of an empty list is not -inf");
        require(out[0] == Answer::untouched, "an output of an empty list");
        return;
    }
    require(answer.lse[index] == 0, "the LSE of a sum is not 0");
    for (uint32_t d = 0; d < g.head_dim; ++d) {
        require(std::fabs(out[d] - sum[d]) <= 1e-5 * (1 + sizes[d]), "an output is not the sum of the values");
    }
}

double allowed_error(DType dtype) { return dtype == DType::bf16 ? 1e-2 : dtype == DType::fp16 ? 2e-3 : 1e-4; }

// Check one query head's attention against the definition of softmax attention.
void check_head(const Geometry& g, const FuzzPool& pool, const Layer& layer, uint64_t list, uint32_t query_head,
                const Answer& answer) {
    const auto dtype = query_dtype(static_cast<DType>(g.dtype));
    const uint64_t index = list * g.group + query_head;
    const float* const out = answer.out.data() + index * g.head_dim;
    std::vector<double> logits, sum(g.head_dim), query(g.head_dim);
    for (uint32_t d = 0; d < g.head_dim; ++d) {
        query[d] = get(dtype, layer.query.data() + (index * g.head_dim + d) * bytes_of(dtype));
    }
    std::vector<const double*> values;
    double largest = -std::numeric_limits<double>::infinity(), weights = 0;
    for (uint64_t i = list * layer.lists.listed; i < (list + 1) * layer.lists.listed && layer.pages[i] >= 0; ++i) {
        for (uint32_t token = 0; token < layer.fill[i]; ++token) {
            if (layer.lists.masks && !(layer.masks[i] >> token & 1)) continue;
            const uint32_t head = uint32_t(list % g.kv_heads);
            const double* const key = pool.key(layer.lists.layer, uint64_t(layer.pages[i]), head, token);
            values.push_back(pool.value(layer.lists.layer, uint64_t(layer.pages[i]), head, token));
            double product = 0;
            for (uint32_t d = 0; d < g.head_dim; ++d) product += key[d] * query.data()[d];
            logits.push_back(product * scale);
            largest = std::max(largest, logits.back());
        }
    }
    if (logits.empty()) {
        require(answer.lse[index] == -std::numeric_limits<float>::infinity(), "the LSE of an empty list is not -inf");
        require(out[0] == Answer::untouched, "an output of an empty list");
        return;
    }
    for (size_t i = 0; i < logits.size(); ++i) {
        const double weight = std::exp(logits[i] - largest);
        weights += weight;
        for (uint32_t d = 0; d < g.head_dim; ++d) sum.data()[d] += weight * values[i][d];
    }
    double difference = 0, norm = 0;
    for (uint32_t d = 0; d < g.head_dim; ++d) {
        const double expected = sum[d] / weights;
        difference += (out[d] - expected) * (out[d] - expected);
        norm += expected * expected;
    }
    // written so that NaN fails
    require(std::sqrt(difference / norm) <= allowed_error(dtype), "an output is not softmax attention");
    require(std::fabs(answer.lse[index] - largest - std::log(weights)) <= 2e-3, "an LSE is not that of the logits");
}

// Check the answer of a post. Returns false if rows are late, as happens when this thread is not scheduled for long between
// ringing the bell and writing its rows.
bool check_answer(Random& random, const Geometry& g, const FuzzPool& pool, sh_client* client, const Layer& layer,
                  uint64_t sequence) {
    Answer answer(g, layer.lists.rows);
    if (collect(client, sequence, patience_ns / 10, answer)) {
        for (const uint8_t was : answer.served) require(was != sh_damaged, "a damaged reply on a fresh mailbox");
        return false;
    }
    // one query head of each list: checking all heads would take most of a round's time
    for (uint64_t list = 0; list < uint64_t{layer.lists.rows} * g.kv_heads; ++list) {
        (layer.lists.weights ? check_sum : check_head)(g, pool, layer, list, random.below(g.group), answer);
    }
    ++checked_posts;
    return true;
}

// -- the worker's side ------------------------------------------------------------------------------------------------

// An engine that runs from construction to destruction. Both must end in time, whatever is in the mailbox.
class RunningEngine {
  public:
    RunningEngine(char* mailbox, const FuzzPool& pool, const Geometry& g, const sh_engine_options& options) : g_(g) {
        const Limit limit("starting an engine");
        char error[sh_error_bytes] = "";
        engine_ = sh_engine_start(mailbox, pool.data(), &g, &options, error);
        require(engine_, "an engine does not start: " + std::string(error));
        if (options.threads == 0) provider_ = std::thread([this] { answer_posts(); });
        ++engines;
    }
    ~RunningEngine() {
        const Limit limit("stopping an engine");
        sh_engine_stats stats{};
        sh_engine_read_stats(engine_, &stats);
        stop_.store(true);
        if (provider_.joinable()) provider_.join();
        sh_engine_stop(engine_);
    }
    RunningEngine(const RunningEngine&) = delete;

  private:
    // Stands in for a provider that computes elsewhere. Relies on the bounds of jobs that the C interface guarantees.
    void answer_posts() {
        const std::vector<float> lse(uint64_t{g_.rows} * g_.kv_heads * g_.group), out(lse.size() * g_.head_dim);
        while (!stop_.load()) {
            sh_job job{};
            {
                const Limit limit("taking a post");
                if (!sh_engine_take(engine_, 1000, &job)) continue;
            }
            require(job.layer < g_.layers && job.rows <= g_.rows && std::isfinite(job.scale), "a job out of bounds");
            for (uint64_t list = 0; list < uint64_t{job.rows} * g_.kv_heads; ++list) {
                if (job.count[list] == 0) continue;
                require(job.count[list] <= g_.max_blocks, "a job with too many blocks");
                require(job.last_fill[list] >= 1 && job.last_fill[list] <= block_tokens, "a job with a bad last block");
                for (uint32_t i = 0; i < job.count[list]; ++i) {
                    require(job.pages[list * g_.max_blocks + i] < g_.pages, "a job with a page behind the pool");
                    for (uint32_t head = 0; job.weights && head < g_.group; ++head) {
                        const uint64_t block = (list * g_.group + head) * g_.max_blocks + i;
                        masks_ += job.weights[block * block_tokens + block_tokens - 1] > 0;
                    }
                    masks_ += job.masks ? job.masks[list * g_.max_blocks + i] : 0;  // read for the sanitizer
                }
            }
            sh_engine_answer(engine_, out.data(), lse.data());
        }
    }

    const Geometry g_;
    sh_engine* engine_ = nullptr;
    std::atomic<uint64_t> masks_{0};
    std::atomic<bool> stop_{false};
    std::thread provider_;
};

std::unique_ptr<sh_client, void (*)(sh_client*)> client_of(FuzzMailbox& mailbox, const Geometry& g) {
    char error[sh_error_bytes] = "";
    require(sh_mailbox_create(mailbox.anybody.data, mailbox.layout.bytes, &g, error) == 0, error);
    sh_client* const client = sh_client_open(mailbox.client.data, &g, error);
    require(client, error);
    return {client, sh_client_close};
}

// Check the answers on a mailbox without an intruder, with two posts at a time.
void well_formed_traffic(Random& random, const Setup& setup, const FuzzPool& pool) {
    const Geometry& g = setup.geometry;
    FuzzMailbox mailbox(g);
    const auto client = client_of(mailbox, g);
    Geometry found{};
    char error[sh_error_bytes] = "";
    const int refused = sh_mailbox_check(mailbox.worker.data, mailbox.layout.bytes, g.pool_bytes, &found, error);
    require(!refused && std::memcmp(&found, &g, sizeof(g)) == 0, "a fresh mailbox has another geometry");
    sh_engine_options options = setup.options;
    options.threads = std::max(options.threads, 1u);
    const RunningEngine engine(mailbox.worker.data, pool, found, options);
    for (uint32_t time = 0; time < (g.max_blocks > 100 ? 1 : 3); ++time) {
        const Layer layers[] = {random_layer(g, random), random_layer(g, random)};
        bool answered = false;
        for (int tries = 0; tries < 5 && !answered; ++tries) {
            const uint64_t sequences[] = {post(client.get(), layers[0], time), post(client.get(), layers[1], time)};
            answered = true;
            for (int i = 0; i < 2; ++i) {
                answered &= check_answer(random, g, pool, client.get(), layers[i], sequences[i]);
            }
        }
        require(answered, "rows without a reply on a fresh mailbox");
    }
}

// -- the intruder ------------------------------------------------------------------------------------------------------

// Writes random and hostile data into a mailbox.
class Intruder {
  public:
    // An intruder with `keeps_order` does not overwrite the sequence numbers of posts, so that traffic continues.
    Intruder(FuzzMailbox& mailbox, const Geometry& g, uint64_t number, uint32_t role, bool keeps_order)
        : random_(number, role), g_(g), layout_(mailbox.layout), base_(mailbox.anybody.data), view_(base_, g),
          keeps_order_(keeps_order) {
        const uint64_t rows = uint64_t{mailbox_slots} * g.rows, heads = rows * g.kv_heads;
        const std::pair<std::string, Range> arrays[] = {
            {"Header", {0, 1}},
            {"Bell", {layout_.bell, 1}},
            {"WorkerLine", {layout_.worker, 1}},
            {"ClientLine", {layout_.client, 1}},
            {"Post", {layout_.posts, mailbox_slots}},
            {"Request", {layout_.requests, rows}},
            {"Reply", {layout_.replies, rows}},
            {"List", {layout_.lists, heads}},
        };
        uint32_t fields = 0;
        const sh_field* const field = sh_mailbox_fields(&fields);
        for (const auto& [record, array] : arrays) {
            uint64_t stride = 0;
            for (const sh_field* f = field; f != field + fields; ++f) {
                if (record != f->record) continue;
                if (!*f->name) {
                    stride = f->bytes;
                    continue;
                }
                const std::string name = record + "." + f->name;
                if (keeps_order && (name == "Bell.posted" || name == "WorkerLine.completed")) continue;
                targets_.push_back({array.first + f->offset, stride, array.second, f->bytes});
            }
        }
        targets_.push_back({layout_.checks, sizeof(uint64_t), rows, sizeof(uint64_t)});
        targets_.push_back({layout_.pages, sizeof(uint32_t), heads * g.max_blocks, sizeof(uint32_t)});
        if (g.flags & geometry_masks) {
            targets_.push_back({layout_.masks, sizeof(uint32_t), heads * g.max_blocks, sizeof(uint32_t)});
        }
    }

    void write_until(const std::atomic<bool>& stop) {
        const uint32_t longest_us = random_.one_of({0u, 0u, 20u, 300u});
        while (!stop.load()) {
            for (uint32_t burst = 1 + random_.below(32); burst; --burst) write_something();
            if (longest_us) sleep_us(random_.below(longest_us));
            else std::this_thread::yield();
        }
    }

    // Write a whole post with valid lists, in which about one field in `damage` is hostile (0: no field), with pauses of
    // up to `pause_us` between its rows. Without damage and pauses all rows are written before the bell, so that none can
    // be late.
    void forge_post(uint64_t sequence, uint32_t rows, uint32_t damage, uint32_t pause_us = 0) {
        const auto sent = [&](uint64_t value) { return damage && random_.once_in(damage) ? hostile_word(value) : value; };
        Post& post = view_.post(sequence);
        store_release(post.layer, sent(random_.below(g_.layers)));
        store_release(post.rows, sent(rows));
        const auto scale_bits = uint32_t(sent(bits_of(scale)));
        std::memcpy(&post.scale, &scale_bits, sizeof(scale_bits));
        const bool masked = (g_.flags & geometry_masks) && random_.once_in(2);
        const bool summed = (g_.flags & geometry_value_sums) && random_.once_in(2);
        const PostKind kind = summed ? PostKind::sum_values : masked ? PostKind::attend_masked : PostKind::attend;
        store_release(post.kind, sent(uint32_t(kind)));
        store_release(post.sequence, sent(sequence));
        const bool bell_first = pause_us || (damage && random_.once_in(2));
        if (bell_first) ring(sequence);
        for (uint32_t row = 0; row < rows; ++row) {
            if (pause_us) sleep_us(random_.below(pause_us));
            const bool is_empty = damage && random_.once_in(8), is_consistent = random_.once_in(2);
            uint32_t blocks = is_empty ? 1 : 0;
            for (uint32_t head = 0; head < g_.kv_heads; ++head) {
                const uint32_t count = is_empty ? 0 : head ? random_.below(g_.max_blocks + 1) : g_.max_blocks;
                for (uint32_t i = 0; i < count; ++i) {
                    uint32_t page = random_.below(g_.pages);
                    if (damage && random_.once_in(40)) {
                        page = random_.once_in(2) ? g_.pages : uint32_t(hostile_word(page));
                    }
                    __atomic_store_n(view_.pages(sequence, row, head) + i, page, __ATOMIC_RELAXED);
                    if (masked)
                        __atomic_store_n(view_.masks(sequence, row, head) + i, uint32_t(random_.bits()), __ATOMIC_RELAXED);
                }
                const auto told = uint32_t(sent(count));
                List& list = view_.lists(sequence, row)[head];
                store_release(list.count, told);
                store_release(list.last_fill, sent(1 + random_.below(block_tokens)));
                blocks += is_consistent ? told : count;
            }
            Request& request = view_.request(sequence, row);
            store_release(request.generation, random_.below(8));
            store_release(request.blocks, sent(blocks));
            store_release(request.sequence, sent(sequence));
            hostile_writes += 3;
        }
        if (!bell_first) ring(sequence);
    }

    void ring(uint64_t sequence) {
        store_ordered(view_.bell().posted, sequence);
        wake_all(view_.client().wake);
    }

    const MailboxView& view() const { return view_; }

  private:
    struct Target {
        uint64_t first, stride, count;
        uint32_t bytes;
    };

    void write_something() {
        const uint32_t choice = random_.below(100);
        if (choice < 65) {
            write_field();
        } else if (choice < 85) {
            write_bytes(1 + (random_.once_in(4) ? random_.below(256) : 0));
        } else if (choice < 87) {
            flicker();
        } else if (choice < 98) {
            forge_post(some_sequence(), 1 + random_.below(g_.rows), random_.one_of({0u, 4u, 20u}));
        } else if (choice < 99) {
            forge_post(some_sequence(), 1 + random_.below(g_.rows), 0, 10'000);
        } else if (!keeps_order_) {
            // back to numbers that a client could have reached, so that the next engine has posts to answer
            store_ordered(view_.worker().completed, random_.below(4));
            store_ordered(view_.bell().posted, random_.below(4));
        }
        ++hostile_writes;
    }

    // Write a valid post, and alternate one of its fields between a good and a bad value: the engine must check the same
    // copy that it then uses.
    void flicker() {
        const uint64_t posted = load_acquire(view_.bell().posted), completed = load_acquire(view_.worker().completed);
        const uint64_t sequence = 1 + (keeps_order_ ? posted : std::max(posted, completed));
        const uint32_t rows = 1 + random_.below(g_.rows), row = random_.below(rows), head = random_.below(g_.kv_heads);
        forge_post(sequence, rows, 0);
        List& list = view_.lists(sequence, row)[head];
        Post& post = view_.post(sequence);
        const std::pair<uint32_t*, uint32_t> words[] = {
            // each field with the lowest value that is too large
            {&list.count, g_.max_blocks + 1},
            {&list.last_fill, block_tokens + 1},
            {view_.pages(sequence, row, head), g_.pages},
            {&post.rows, g_.rows + 1},
            {&post.layer, g_.layers},
            {&post.kind, 1 + uint32_t(PostKind::sum_values)},
            // invalid if the mailbox has no arrays for this kind
            {&post.kind, uint32_t(PostKind::attend_masked)},
            {&post.kind, uint32_t(PostKind::sum_values)},
        };
        const auto& [place, too_large] = words[random_.below(std::size(words))];
        uint32_t& word = *place;
        const uint32_t good = load_acquire(word), bad = random_.once_in(2) ? too_large : uint32_t(hostile_word(good));
        const Reply& reply = view_.reply(sequence, row);
        for (uint32_t times = 0; times < 20'000 && load_acquire(reply.sequence) != sequence; ++times) {
            store_release(word, bad);
            store_release(word, good);
        }
    }

    // Return a hostile value for a field, often one just at or beyond a bound of the geometry.
    uint64_t hostile_word(uint64_t now) {
        if (!random_.once_in(3)) return random_.hostile_word(now);
        const uint32_t bounds[] = {g_.rows, g_.kv_heads, g_.layers, g_.pages, g_.max_blocks, block_tokens};
        return uint64_t{bounds[random_.below(std::size(bounds))]} + random_.below(3) - 1;
    }

    uint64_t some_sequence() {
        const uint64_t posted = load_acquire(view_.bell().posted), completed = load_acquire(view_.worker().completed);
        if (keeps_order_) return posted + random_.below(2);  // the client's last or next post
        if (random_.once_in(2)) return completed + 1 + random_.below(3);
        return random_.hostile_word(random_.once_in(2) ? posted : completed);
    }

    void write_field() {
        const Target& target = targets_[random_.below(targets_.size())];
        char* place = base_ + target.first + random_.below(target.count) * target.stride;
        if (target.bytes == sizeof(uint64_t)) {
            auto& word = *reinterpret_cast<uint64_t*>(place);
            store_release(word, hostile_word(load_acquire(word)));
        } else {
            place += random_.below(target.bytes / sizeof(uint32_t)) * sizeof(uint32_t);  // a geometry has many words
            auto& word = *reinterpret_cast<uint32_t*>(place);
            store_release(word, hostile_word(load_acquire(word)));
        }
    }

    void write_bytes(uint32_t count) {
        const uint64_t first = keeps_order_ ? layout_.requests : 0;
        uint64_t at = first + random_.bits() % (layout_.bytes - first);
        for (; count && at < layout_.bytes; ++at, --count) {
            __atomic_store_n(base_ + at, char(random_.bits()), __ATOMIC_RELAXED);
        }
    }

    Random random_;
    const Geometry g_;
    const MailboxLayout layout_;
    char* const base_;
    const MailboxView view_;
    const bool keeps_order_;
    std::vector<Target> targets_;
};

// Post valid layers, and collect their answers or give up. Answers may have any content; the calls must return.
void client_traffic(sh_client* client, const Geometry& g, Random random, const std::atomic<bool>& stop) {
    while (!stop.load()) {
        const uint32_t posts = 1 + random.below(3);
        std::vector<Layer> layers;
        std::vector<uint64_t> sequences;
        for (uint32_t i = 0; i < posts; ++i) {
            layers.push_back(random_layer(g, random));
            sequences.push_back(post(client, layers.back(), random.below(8)));
        }
        for (uint32_t i = 0; i < posts; ++i) {
            Answer answer(g, layers[i].lists.rows);
            const uint64_t timeout_ns = random.one_of({0u, 200'000u, 3'000'000u, 20'000'000u});
            if (collect(client, sequences[i], timeout_ns, answer) == 0) ++answered_posts;
            for (const uint8_t outcome : answer.served) {
                require((outcome == sh_overwritten) == (i + mailbox_slots < posts), "overwritten, or not, by newer posts");
            }
        }
        if (random.once_in(8)) sh_client_wake(client);
        if (random.once_in(4)) sleep_us(random.below(2000));
    }
}

// Do what a scheduler's monitoring thread does all the time.
void wait_for_ends(const sh_client* client, Random random, const std::atomic<bool>& stop) {
    while (!stop.load()) {
        const Limit limit("waiting for the worker's end");
        sh_client_wait_for_end(client, random.below(20'000'000));
        sh_client_completed(client);
        sh_client_heartbeat(client);
        sleep_us(random.below(2000));
    }
}

void hostile_traffic(Random& random, uint64_t number, const Setup& setup, const FuzzPool& pool) {
    const Geometry& g = setup.geometry;
    FuzzMailbox mailbox(g);
    const auto client = client_of(mailbox, g);
    Intruder intruder(mailbox, g, number, 1, random.once_in(2));
    std::atomic<bool> stop{false};
    std::thread writing([&] { intruder.write_until(stop); });
    std::thread posting([&] { client_traffic(client.get(), g, Random(number, 2), stop); });
    std::thread waiting([&] { wait_for_ends(client.get(), Random(number, 3), stop); });
    for (uint32_t lives = 1 + random.below(4); lives; --lives) {
        const RunningEngine engine(mailbox.worker.data, pool, g, setup.options);
        sleep_us(random.below(80'000));
        // an accepted geometry must be servable, whatever the intruder wrote into the header
        Geometry found{};
        if (sh_mailbox_check(mailbox.worker.data, mailbox.layout.bytes, g.pool_bytes, &found, nullptr) == 0) {
            require_servable(found);
            require(layout_of(found).bytes <= mailbox.layout.bytes, "a mailbox that is too small");
        }
    }
    stop.store(true);
    for (std::thread* thread : {&writing, &posting, &waiting}) thread->join();
}

// -- cases that random writes produce too rarely ------------------------------------------------------------------------

Setup plain_setup(uint32_t rows, uint32_t threads, uint32_t max_blocks, uint32_t task_blocks) {
    const Geometry g{rows, 2, 2, 64, uint32_t(DType::fp32), max_blocks, 1, 4, 0, 0, 0, 0, 0};
    return {FuzzPool::with_pool(g, 1, 64), {threads, 1, task_blocks, 50, nullptr, nullptr}};
}

// Check posts with sequence numbers near the limits of 64 bits, or 0, that arrive before an engine starts or while it runs.
void check_sequences(Random& random) {
    const Setup setup = plain_setup(3, 2, 4, 1);
    const FuzzPool pool(setup.geometry, [&] { return random.value(); });
    const uint64_t most = ~uint64_t{0};
    for (const uint64_t sequence : {uint64_t{1}, uint64_t{2}, uint64_t{1} << 32, last_sequence - 1, last_sequence,
                                    last_sequence + 1, last_sequence + 2, most - 2, most - 1, most, uint64_t{0}}) {
        for (const bool is_running : {false, true}) {
            FuzzMailbox mailbox(setup.geometry);
            const auto client = client_of(mailbox, setup.geometry);
            Intruder intruder(mailbox, setup.geometry, sequence, 4, false);
            const MailboxView& view = intruder.view();
            const auto post = [&] { intruder.forge_post(sequence, setup.geometry.rows, 0); };
            if (!is_running) {
                view.worker().completed = sequence - 1;
                post();
            }
            const RunningEngine engine(mailbox.worker.data, pool, setup.geometry, setup.options);
            if (is_running) post();
            if (sequence < 1 || sequence > last_sequence) {
                sleep_us(20'000);
                continue;
            }
            const Limit limit("answering a post with a large number");
            for (uint32_t row = 0; row < setup.geometry.rows; ++row) {
                while (load_acquire(view.reply(sequence, row).sequence) != sequence) sleep_us(100);
            }
        }
    }
}

// Check a bell that repeats an earlier number: the post is answered like any other.
void check_repeated_numbers(Random& random) {
    const Setup setup = plain_setup(3, 1, 4, 1);
    const FuzzPool pool(setup.geometry, [&] { return random.value(); });
    FuzzMailbox mailbox(setup.geometry);
    const auto client = client_of(mailbox, setup.geometry);
    Intruder intruder(mailbox, setup.geometry, 0, 6, false);
    const MailboxView& view = intruder.view();
    const RunningEngine engine(mailbox.worker.data, pool, setup.geometry, setup.options);
    for (const uint64_t sequence : {1, 2, 1}) {
        for (uint32_t row = 0; row < setup.geometry.rows; ++row) store_release(view.reply(sequence, row).sequence, 0);
        intruder.forge_post(sequence, setup.geometry.rows, 0);
        const Limit limit("answering a number that was there before");
        while (load_acquire(view.worker().completed) != sequence) sleep_us(100);
        for (uint32_t row = 0; row < setup.geometry.rows; ++row) {
            require(load_acquire(view.reply(sequence, row).sequence) == sequence, "a row without a reply");
        }
    }
}

// Check a client that writes its rows one by one, each just in time: the engine must still stop in time, with and without
// threads.
void check_slow_rows(Random& random) {
    for (const uint32_t threads : {1u, 0u}) {
        const Setup setup = plain_setup(4096, threads, 1, 1);
        const FuzzPool pool(setup.geometry, [&] { return random.value(); });
        FuzzMailbox mailbox(setup.geometry);
        const auto client = client_of(mailbox, setup.geometry);
        Intruder intruder(mailbox, setup.geometry, threads, 5, false);
        const MailboxView& view = intruder.view();
        std::atomic<bool> stop{false};
        store_release(view.post(1).rows, setup.geometry.rows);
        store_release(view.post(1).sequence, 1);
        store_release(view.request(1, 0).sequence, 1);
        intruder.ring(1);
        std::thread writing([&] {
            for (uint32_t row = 1; row < setup.geometry.rows && !stop.load(); ++row) {
                store_release(view.request(1, row).sequence, 1);
                sleep_us(20'000);
            }
        });
        {
            const RunningEngine engine(mailbox.worker.data, pool, setup.geometry, setup.options);
            const Limit limit("answering the first of slow rows");
            while (load_acquire(view.reply(1, 0).sequence) != 1) sleep_us(100);
        }
        stop.store(true);
        writing.join();
    }
}

// Check tasks that are larger than every list.
void check_large_tasks(Random& random) {
    const Setup setup = plain_setup(3, 2, 4, ~0u);
    const FuzzPool pool(setup.geometry, [&] { return random.value(); });
    well_formed_traffic(random, setup, pool);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: mailbox_fuzz SEED SECONDS [FIRST_ROUND]\n");
        return 2;
    }
    seed = std::strtoull(argv[1], nullptr, 0);
    const uint64_t end = now_ns() + uint64_t(std::atof(argv[2]) * 1e9);
    const uint64_t first = argc > 3 ? std::strtoull(argv[3], nullptr, 0) : 1;
    std::thread(watch_limits).detach();

    Random directed(0, 0);
    check_large_tasks(directed);
    check_sequences(directed);
    check_repeated_numbers(directed);
    check_slow_rows(directed);
    uint64_t rounds = 0;
    for (round_number = first; now_ns() < end; ++round_number, ++rounds) {
        Random random(round_number, 0);
        check_geometries(random);
        const Setup setup = random_setup(random);
        const FuzzPool pool(setup.geometry, [&] { return random.value(); });
        hostile_traffic(random, round_number, setup, pool);
        well_formed_traffic(random, setup, pool);
    }
    std::printf("seed %" PRIu64 ": %" PRIu64 " rounds, %" PRIu64 " engines, %" PRIu64 " hostile writes, %" PRIu64
                " posts answered meanwhile, %" PRIu64 " posts compared with softmax\n",
                seed, rounds, engines.load(), hostile_writes.load(), answered_posts.load(), checked_posts.load());
    return 0;
}
