#include "sglang_hybrid/c_api.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "engine/external_jobs.h"
#include "engine/flags.h"
#include "engine/life.h"
#include "engine/local.h"
#include "engine/mailbox_client.h"
#include "engine/read_bandwidth.h"
#include "host/decoder.h"

using namespace sglang_hybrid;

struct sh_client {
    MailboxClient mailbox;
};

struct sh_host {
    HostDecoder decoder;
};

struct sh_engine {
    std::unique_ptr<Engine> threads;
    std::unique_ptr<ExternalJobs> jobs;
};

namespace {

int fail(char* error, const std::string& sentence) {
    if (error) {
        const size_t length = std::min<size_t>(sentence.size(), sh_error_bytes - 1);
        std::memcpy(error, sentence.data(), length);
        error[length] = 0;
    }
    return 1;
}

// Call work(), and turn an exception (no memory, no threads) into a failure: the interface must not throw.
template <class Work>
int guarded(char* error, Work work) {
    try {
        return work();
    } catch (const std::exception& problem) {
        return fail(error, problem.what());
    }
}

// Return the kernels of a shape: either both or, for an unsupported shape, none.
Kernels kernels_of(const Geometry& g, const char* variant) {
    const auto dtype = static_cast<DType>(g.dtype);
    return {find_kernel(dtype, g.head_dim, variant), find_sum_kernel(dtype, g.head_dim, variant)};
}

std::string no_kernel(const Geometry& g, const char* variant) {
    return "no CPU kernel for head_dim " + std::to_string(g.head_dim) +
           (variant ? " and variant " + std::string(variant) : "") +
           " on this machine: head_dim must be 64, 96, 128 or 256, variants are " + variants();
}

#define FIELD(record, name) {#record, #name, offsetof(record, name), sizeof(record::name)}
#define WHOLE(record) {#record, "", 0, sizeof(record)}  // a field without a name has the size of the whole struct
constexpr sh_field fields[] = {
    WHOLE(Header),
    FIELD(Header, magic),
    FIELD(Header, version),
    FIELD(Header, header_bytes),
    FIELD(Header, mailbox_bytes),
    FIELD(Header, geometry),
    WHOLE(Geometry),
    FIELD(Geometry, rows),
    FIELD(Geometry, kv_heads),
    FIELD(Geometry, group),
    FIELD(Geometry, head_dim),
    FIELD(Geometry, dtype),
    FIELD(Geometry, max_blocks),
    FIELD(Geometry, layers),
    FIELD(Geometry, pages),
    FIELD(Geometry, keys),
    FIELD(Geometry, values),
    FIELD(Geometry, layer_stride),
    FIELD(Geometry, pool_bytes),
    FIELD(Geometry, flags),
    WHOLE(Bell),
    FIELD(Bell, posted),
    WHOLE(WorkerLine),
    FIELD(WorkerLine, completed),
    FIELD(WorkerLine, heartbeat),
    FIELD(WorkerLine, parked),
    FIELD(WorkerLine, done),
    FIELD(WorkerLine, life),
    WHOLE(ClientLine),
    FIELD(ClientLine, wake),
    FIELD(ClientLine, waiting),
    FIELD(ClientLine, gone),
    WHOLE(Post),
    FIELD(Post, sequence),
    FIELD(Post, layer),
    FIELD(Post, rows),
    FIELD(Post, scale),
    FIELD(Post, kind),
    WHOLE(Request),
    FIELD(Request, sequence),
    FIELD(Request, generation),
    FIELD(Request, blocks),
    WHOLE(Reply),
    FIELD(Reply, sequence),
    FIELD(Reply, generation),
    FIELD(Reply, status),
    WHOLE(List),
    FIELD(List, count),
    FIELD(List, last_fill),
};
#undef FIELD
#undef WHOLE

}  // namespace

uint32_t sh_interface_version() { return sh_interface; }

// -- kernels -----------------------------------------------------------------------------------------------------------

const char* sh_variants() { return variants(); }

const char* sh_variant_name(uint32_t dtype, uint32_t head_dim, const char* variant) {
    return variant_name(static_cast<DType>(dtype), head_dim, variant);
}

int sh_attend(const BlockAttention* task, const char* variant, char* error) {
    const Kernel kernel = find_kernel(task->dtype, task->head_dim, variant);
    if (!kernel) return fail(error, "no such kernel on this machine");
    if (task->group < 1 || task->group > max_group) return fail(error, "query heads per KV head must be 1 to 16");
    if (task->count && (task->last_fill < 1 || task->last_fill > block_tokens)) return fail(error, "last_fill must be 1 to 32");
    attend(kernel, *task);
    return 0;
}

double sh_read_bandwidth(const void* memory, uint64_t bytes, uint32_t threads, const int32_t* cores) {
    return read_bandwidth(memory, bytes, threads, cores);
}

// -- mailbox -----------------------------------------------------------------------------------------------------------

const sh_field* sh_mailbox_fields(uint32_t* count) {
    *count = std::size(fields);
    return fields;
}

int sh_mailbox_layout(const Geometry* geometry, MailboxLayout* layout, char* error) {
    if (const char* const problem = problem_of(*geometry)) return fail(error, problem);
    *layout = layout_of(*geometry);
    return 0;
}

int sh_mailbox_create(void* mailbox, uint64_t bytes, const Geometry* geometry, char* error) {
    if (const char* const problem = problem_of(*geometry)) return fail(error, problem);
    const uint64_t needed = layout_of(*geometry).bytes;
    if (bytes < needed) {
        return fail(error, "the mailbox has " + std::to_string(bytes) + " bytes and needs " + std::to_string(needed));
    }
    const Header header{mailbox_magic, mailbox_version, sizeof(Header), needed, *geometry};
    std::memcpy(mailbox, &header, sizeof(header));
    return 0;
}

int sh_mailbox_check(const void* mailbox, uint64_t bytes, uint64_t pool_bytes, Geometry* geometry, char* error) {
    Header header;
    if (bytes < sizeof(header)) return fail(error, "too small for a mailbox");
    std::memcpy(&header, mailbox, sizeof(header));  // read once: shared memory may change
    if (header.magic != mailbox_magic) return fail(error, "not a mailbox");
    if (header.version != mailbox_version) {
        return fail(error, "a mailbox of version " + std::to_string(header.version) + ", this side has version " +
                               std::to_string(mailbox_version));
    }
    if (header.header_bytes != sizeof(Header)) {
        return fail(error, "the mailbox has a header of " + std::to_string(header.header_bytes) + " bytes, this side has " +
                               std::to_string(sizeof(Header)));
    }
    if (const char* const problem = problem_of(header.geometry)) return fail(error, problem);
    if (header.geometry.pool_bytes != pool_bytes) {
        return fail(error, "the mailbox is for a pool of " + std::to_string(header.geometry.pool_bytes) +
                               " bytes, this one has " + std::to_string(pool_bytes));
    }
    const uint64_t needed = layout_of(header.geometry).bytes;
    if (header.mailbox_bytes != needed || bytes < needed) {
        return fail(error, "the mailbox has " + std::to_string(std::min(bytes, header.mailbox_bytes)) +
                               " bytes, its geometry needs " + std::to_string(needed));
    }
    *geometry = header.geometry;
    return 0;
}

// -- client ------------------------------------------------------------------------------------------------------------

sh_client* sh_client_open(void* mailbox, const Geometry* geometry, char* error) {
    sh_client* client = nullptr;
    guarded(error, [&] {
        if (const char* const problem = problem_of(*geometry)) return fail(error, problem);
        client = new sh_client{MailboxClient(mailbox, *geometry)};
        return 0;
    });
    return client;
}

void sh_client_close(sh_client* client) { delete client; }

int sh_client_post(sh_client* client, const sh_lists* lists, uint32_t generation, uint64_t* sequence, char* error) {
    return guarded(error, [&] {
        const std::string problem = problem_of(*lists, client->mailbox.view.geometry);
        if (!problem.empty()) return fail(error, problem);
        if (lists->masks && !(client->mailbox.view.geometry.flags & geometry_masks)) {
            return fail(error, "the lists have masks and the mailbox has none: the policy has to declare Needs(masks=True)");
        }
        if (lists->weights && !(client->mailbox.view.geometry.flags & geometry_value_sums)) {
            return fail(error, "the mailbox has no room for weights: the policy has to declare Needs(value_sums=True)");
        }
        *sequence = client->mailbox.post(*lists, generation);
        return 0;
    });
}

uint32_t sh_client_collect(sh_client* client, uint64_t sequence, uint32_t rows, uint64_t timeout_ns, const uint32_t* gone,
                           float* out, float* lse, uint8_t* served) {
    return client->mailbox.collect(sequence, rows, timeout_ns, gone, out, lse, served);
}

void sh_client_wake(sh_client* client) { client->mailbox.wake(); }

uint64_t sh_client_completed(const sh_client* client) { return load_acquire(client->mailbox.view.worker().completed); }

int sh_client_wait_for_end(const sh_client* client, uint64_t timeout_ns) {
    return wait_for_end(client->mailbox.view.worker(), timeout_ns);
}

uint64_t sh_client_heartbeat(const sh_client* client) { return load_acquire(client->mailbox.view.worker().heartbeat); }

// -- without a worker --------------------------------------------------------------------------------------------------

int sh_attend_local(const char* pool, const Geometry* geometry, const sh_lists* lists, uint32_t task_blocks, uint32_t threads,
                    const uint8_t* served, float* out, float* lse, char* error) {
    return guarded(error, [&] {
        if (const char* const problem = problem_of(*geometry)) return fail(error, problem);
        const std::string problem = problem_of(*lists, *geometry);
        if (!problem.empty()) return fail(error, problem);
        if (task_blocks < 1) return fail(error, "a task must have at least one block");
        const Kernels kernels = kernels_of(*geometry, nullptr);
        if (!kernels.attend) return fail(error, no_kernel(*geometry, nullptr));
        attend_local(pool, *geometry, *lists, task_blocks, threads, served, out, lse, kernels);
        return 0;
    });
}

int sh_token_weights(const char* pool, const Geometry* geometry, const sh_lists* lists, uint32_t threads, const float* lse,
                     float* weights, char* error) {
    return guarded(error, [&] {
        if (const char* const problem = problem_of(*geometry)) return fail(error, problem);
        const std::string problem = problem_of(*lists, *geometry);
        if (!problem.empty()) return fail(error, problem);
        if (lists->weights) return fail(error, "weights are computed from a query, not from weights");
        const WeightKernel kernel = find_weight_kernel(static_cast<DType>(geometry->dtype), geometry->head_dim, nullptr);
        if (!kernel) return fail(error, no_kernel(*geometry, nullptr));
        token_weights(pool, *geometry, *lists, threads, lse, weights, kernel);
        return 0;
    });
}

// -- decode on a host without a GPU ------------------------------------------------------------------------------------

namespace {

std::string problem_of(const sh_host_options& options, const Geometry& g) {
    if (options.threads < 1) return "at least one thread is needed";
    if (options.budget_blocks < options.sink_blocks + options.recent_blocks + 1) {
        return "the budget must hold the blocks that are always selected";
    }
    if (options.channels % 16 || options.channels > g.head_dim) {
        return "channels of a sketch must be a multiple of 16, at most head_dim";
    }
    return {};
}

TensorRows rows_of(const sh_rows* rows) { return {static_cast<const char*>(rows->data), rows->stride}; }

}  // namespace

sh_host* sh_host_open(char* pool, const Geometry* geometry, const sh_host_layer* layers, const sh_host_options* options,
                      char* error) {
    sh_host* host = nullptr;
    guarded(error, [&] {
        const Geometry& g = *geometry;
        if (const char* const problem = problem_of(g)) return fail(error, problem);
        const std::string problem = problem_of(*options, g);
        if (!problem.empty()) return fail(error, problem);
        const Kernel kernel = find_kernel(static_cast<DType>(g.dtype), g.head_dim, nullptr);
        if (!kernel) return fail(error, no_kernel(g, nullptr));
        std::vector<HostLayer> known;
        for (const sh_host_layer* layer = layers; layer != layers + g.layers; ++layer) {
            known.push_back({static_cast<char*>(layer->digests), static_cast<uint8_t*>(layer->codes), {}});
            if (!layer->codes) continue;
            for (uint32_t i = 0; i < g.kv_heads * options->channels; ++i) {
                if (layer->channels[i] < 0 || layer->channels[i] >= g.head_dim) {
                    return fail(error, "a sketch has a channel that keys do not have");
                }
                known.back().position.push_back(static_cast<uint32_t>(layer->channels[i]));
            }
        }
        const SelectionRules rules{options->budget_blocks, options->sink_blocks, options->recent_blocks};
        const Threads threads(options->threads, reinterpret_cast<OpenMP>(options->openmp));
        host = new sh_host{HostDecoder(pool, g, std::move(known), options->channels, options->spread, rules, kernel, threads)};
        return 0;
    });
    return host;
}

void sh_host_close(sh_host* host) { delete host; }

int sh_host_begin(sh_host* host, const int64_t* pages, uint32_t stride, const int64_t* lengths, const int64_t* new_tokens,
                  uint32_t rows, char* error) {
    return guarded(error, [&] {
        const std::string problem = host->decoder.begin(pages, stride, lengths, new_tokens, rows);
        return problem.empty() ? 0 : fail(error, problem);
    });
}

int sh_host_store(sh_host* host, uint32_t layer, const sh_rows* keys, const sh_rows* values, char* error) {
    return guarded(error, [&] {
        if (layer >= host->decoder.geometry.layers) return fail(error, "no such layer");
        host->decoder.store(layer, rows_of(keys), rows_of(values));
        return 0;
    });
}

int sh_host_decode(sh_host* host, uint32_t layer, const sh_rows* query, const sh_rows* keys, const sh_rows* values, float scale,
                   float* out, char* error) {
    return guarded(error, [&] {
        if (layer >= host->decoder.geometry.layers) return fail(error, "no such layer");
        host->decoder.decode(layer, rows_of(query), rows_of(keys), rows_of(values), scale, out);
        return 0;
    });
}

int sh_host_summarise(sh_host* host, uint32_t layer, const int64_t* pages, const int64_t* filled, uint64_t count, char* error) {
    return guarded(error, [&] {
        if (layer >= host->decoder.geometry.layers) return fail(error, "no such layer");
        const std::string problem = host->decoder.summarise(layer, pages, filled, count);
        return problem.empty() ? 0 : fail(error, problem);
    });
}

// -- worker ------------------------------------------------------------------------------------------------------------

sh_engine* sh_engine_start(void* mailbox, const char* pool, const Geometry* geometry, const sh_engine_options* options,
                           char* error) {
    sh_engine* engine = nullptr;
    guarded(error, [&] {
        if (const char* const problem = problem_of(*geometry)) return fail(error, problem);
        auto made = std::make_unique<sh_engine>();
        if (options->threads == 0) {
            made->jobs = std::make_unique<ExternalJobs>(mailbox, *geometry, options->spin_us);
        } else {
            if (options->group_threads < 1 || options->task_blocks < 1) {
                return fail(error, "threads of a group and blocks of a task must be at least 1");
            }
            const Kernels kernels = kernels_of(*geometry, options->variant);
            if (!kernels.attend) return fail(error, no_kernel(*geometry, options->variant));
            EngineOptions chosen{options->threads,
                                 std::min(options->group_threads, options->threads),
                                 options->task_blocks,
                                 options->spin_us,
                                 {}};
            if (options->cores) chosen.cores.assign(options->cores, options->cores + options->threads);
            made->threads = std::make_unique<Engine>(mailbox, pool, *geometry, chosen, kernels);
        }
        engine = made.release();
        return 0;
    });
    return engine;
}

void sh_engine_stop(sh_engine* engine) { delete engine; }

uint32_t sh_engine_threads(const sh_engine* engine) { return engine->threads ? engine->threads->threads() : 0; }

void sh_engine_read_stats(const sh_engine* engine, sh_engine_stats* stats) {
    const PostReader& reader = engine->threads ? engine->threads->reader : engine->jobs->reader;
    *stats = {};
    stats->posts = reader.posts;
    stats->rows = reader.rows;
    stats->refused_rows = reader.refused;
    stats->abandoned_posts = reader.abandoned;
    stats->busy_ns = reader.busy_ns;
    stats->parks = reader.parks;
    if (engine->threads) {
        const Engine::Sums sums = engine->threads->sums();
        stats->blocks = sums.blocks;
        stats->stolen_tasks = sums.stolen;
        stats->tasks = sums.tasks;
    } else {
        stats->blocks = engine->jobs->blocks;
    }
}

int sh_engine_take(sh_engine* engine, uint64_t timeout_us, sh_job* job) {
    ExternalJobs* const jobs = engine->jobs.get();
    if (!jobs || !jobs->take(timeout_us * 1000)) return 0;
    const OpenPost& post = jobs->post;
    *job = {post.sequence,
            post.layer,
            post.rows,
            post.scale,
            static_cast<uint32_t>(post.kind),
            jobs->query.data(),
            jobs->count.data(),
            jobs->last_fill.data(),
            jobs->pages.data(),
            post.kind == PostKind::attend_masked ? jobs->masks.data() : nullptr,
            post.kind == PostKind::sum_values ? jobs->weights.data() : nullptr};
    return 1;
}

void sh_engine_answer(sh_engine* engine, const float* out, const float* lse) {
    if (engine->jobs) engine->jobs->answer(out, lse);
}
