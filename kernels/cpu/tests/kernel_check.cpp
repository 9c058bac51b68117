// Check of every variant of block attention that this machine can run, against attention in fp64.
//
//   kernel_check [--every N]            exit status 0, or lines that say what failed; N: check only every Nth shape
//   kernel_check --bench [threads] [group] [variant]   GB/s of keys and values, and of a plain read of the same memory
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sglang_hybrid/block_attention.h"
#include "values.h"

using namespace sglang_hybrid;

namespace {

const char* name_of(DType dtype) {
    constexpr const char* names[] = {"bf16", "fp16", "fp32", "fp8-bf16", "fp8-fp16", "fp8-fp32"};
    return names[static_cast<uint32_t>(dtype)];
}

std::vector<std::string> available_variants() {
    std::vector<std::string> names;
    std::string all = variants();
    for (size_t begin = 0; begin <= all.size();) {
        const size_t end = std::min(all.find(',', begin), all.size());
        names.push_back(all.substr(begin, end - begin));
        begin = end + 1;
    }
    return names;
}

void put_poison(DType dtype, char* to, uint32_t which) {
    const bool is_nan = which % 2 == 0;
    if (is_fp8(dtype)) {
        *to = static_cast<char>(is_nan ? 0x7f : 0xff);  // both are NaN
        return;
    }
    const uint16_t half = dtype == DType::bf16 ? (is_nan ? 0x7fc1 : 0xff80) : (is_nan ? 0x7e01 : 0xfc00);
    const uint32_t full = is_nan ? 0x7fc00001 : 0xff800000;
    std::memcpy(to, dtype == DType::fp32 ? static_cast<const void*>(&full) : &half, bytes_of(dtype));
}

// -- memory -----------------------------------------------------------------------------------------------------------

// Memory that ends right before an inaccessible page and begins behind bytes that must not change.
class Guarded {
  public:
    explicit Guarded(size_t bytes) : bytes_(bytes) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        mapped_ = (bytes + guard + page - 1) / page * page + page;
        base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + mapped_ - page, page, PROT_NONE) != 0) {
            std::perror("kernel_check: guarded memory");
            std::exit(2);
        }
        data_ = base_ + mapped_ - page - bytes;
        std::memset(base_, 0xff, static_cast<size_t>(data_ - base_));
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(base_, mapped_); }

    char* data() const { return data_; }
    size_t size() const { return bytes_; }
    bool intact() const {
        return std::all_of(base_, data_, [](char byte) { return static_cast<unsigned char>(byte) == 0xff; });
    }

  private:
    static constexpr size_t guard = 256;
    size_t bytes_, mapped_;
    char* base_;
    char* data_;
};

// -- one case ---------------------------------------------------------------------------------------------------------

enum class Masks { none, half, few, most, whole, empty };  // which tokens count; none: no masks

struct Shape {
    DType dtype;
    uint32_t dim, group, count, last_fill;
    float key_size = 1.0f;  // standard deviation of keys; queries and values have 1
    uint32_t seed = 0;
    Masks masks = Masks::none;
};

std::string describe(const Shape& shape) {
    char text[160];
    std::snprintf(text, sizeof text, "%s head_dim %u group %u count %u last_fill %u key_size %g seed %u masks %d",
                  name_of(shape.dtype), shape.dim, shape.group, shape.count, shape.last_fill,
                  static_cast<double>(shape.key_size), shape.seed, static_cast<int>(shape.masks));
    return text;
}

struct Result {
    std::vector<float> out, lse;
};

// A list of blocks of KV head 1 of 2, in pages in random order, with its attention in fp64. All numbers of the pool that are
// not of a token that counts are NaN or infinite.
class Case {
  public:
    explicit Case(const Shape& shape)
        : shape_(shape), row_(shape.dim * bytes_of(shape.dtype)), page_stride_(2 * block_tokens * row_),
          query_(shape.group * shape.dim * query_bytes_of(shape.dtype)), keys_((shape.count + 1) * page_stride_),
          values_((shape.count + 1) * page_stride_), pages_(shape.count + 1), masks_(shape.count + 1) {
        std::mt19937 random(shape.seed);
        std::normal_distribution<float> normal;
        fill_query([&] { return normal(random); });
        poison(keys_, 0);
        poison(values_, 1);
        std::iota(pages_.begin(), pages_.end(), 0u);
        std::shuffle(pages_.begin(), pages_.end(), random);
        for (uint32_t& mask : masks_) mask = random_mask(random);
        for (uint32_t i = 0; i < shape.count; ++i) {
            for (uint32_t token = 0; token < block_tokens; ++token) {
                for (uint32_t d = 0; counts(i, token) && d < shape.dim; ++d) {
                    put(shape.dtype, at(keys_, i, token, d), normal(random) * shape.key_size);
                    put(shape.dtype, at(values_, i, token, d), normal(random));
                }
            }
        }
        attend_in_fp64();
    }

    BlockAttention work(float* out, float* lse, const BlockAttention* next) const {
        return {query_.data(),
                keys_.data() + block_tokens * row_,
                values_.data() + block_tokens * row_,
                page_stride_,
                pages_.data(),
                shape_.masks == Masks::none ? nullptr : masks_.data(),
                shape_.count,
                shape_.last_fill,
                shape_.group,
                shape_.dim,
                shape_.dtype,
                scale(),
                out,
                lse,
                next};
    }

    // Run a kernel and set `problem` if it writes in front of its output. With `announced`, BlockAttention::next announces
    // another call, with the same list, which ends at a guard.
    Result run(Kernel kernel, std::string& problem, bool announced = false) const {
        Guarded out(shape_.group * shape_.dim * 4), lse(shape_.group * 4);
        std::fill_n(reinterpret_cast<float*>(out.data()), shape_.group * shape_.dim, untouched);
        const BlockAttention next = work(nullptr, nullptr, nullptr);
        attend(kernel,
               work(reinterpret_cast<float*>(out.data()), reinterpret_cast<float*>(lse.data()), announced ? &next : nullptr));
        if (!out.intact() || !lse.intact()) {
            problem = "wrote in front of its output";
        }
        const auto floats = [](const Guarded& from) {
            std::vector<float> to(from.size() / 4);
            std::memcpy(to.data(), from.data(), from.size());
            return to;
        };
        return {floats(out), floats(lse)};
    }

    struct Errors {
        double out = 0;  // relative l2 error of a head's output
        double lse = 0;
    };

    Errors errors_of(const Result& result) const {
        Errors errors;
        for (uint32_t head = 0; head < shape_.group; ++head) {
            double difference = 0, norm = 0;
            for (uint32_t d = 0; d < shape_.dim; ++d) {
                const double expected = out_[head * shape_.dim + d];
                const double got = result.out[head * shape_.dim + d];
                difference += (got - expected) * (got - expected);
                norm += expected * expected;
            }
            const double error = std::sqrt(difference / norm);
            // written so that NaN is kept as an error
            errors.out = error <= errors.out ? errors.out : error;
            const double lse = std::fabs(result.lse[head] - lse_[head]);
            errors.lse = lse <= errors.lse ? errors.lse : lse;
        }
        return errors;
    }

    // The error that rounding the logits to fp32 may add to the error that the dtype allows.
    double logit_error() const { return logit_error_; }

    bool is_empty() const { return std::isinf(lse_[0]); }

    // Return true if a kernel gave the result of an empty list: LSEs of -inf, and outputs not written.
    bool left_empty(const Result& result) const {
        const auto is_untouched = [](float value) { return bits_of(value) == bits_of(untouched); };
        const auto is_empty = [](float value) { return value == -std::numeric_limits<float>::infinity(); };
        return std::all_of(result.out.begin(), result.out.end(), is_untouched) &&
               std::all_of(result.lse.begin(), result.lse.end(), is_empty);
    }

  private:
    static constexpr float untouched = 12345.0f;

    float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.dim)); }

    uint32_t tokens_of(uint32_t index) const { return index + 1 == shape_.count ? shape_.last_fill : block_tokens; }

    uint32_t random_mask(std::mt19937& random) const {
        if (shape_.masks == Masks::none || shape_.masks == Masks::whole) return ~0u;
        if (shape_.masks == Masks::empty || random() % 8 == 0) return 0;
        if (random() % 8 == 0) return ~0u;  // whole blocks beside others
        uint32_t mask = 0;
        for (uint32_t token = 0; token < block_tokens; ++token) {
            const uint32_t chance = shape_.masks == Masks::half ? 16 : shape_.masks == Masks::few ? 2 : 30;  // of 32
            mask |= uint32_t{random() % 32 < chance} << token;
        }
        return mask;
    }

    bool counts(uint32_t index, uint32_t token) const { return token < tokens_of(index) && (masks_[index] >> token & 1); }

    char* at(const Guarded& pool, uint32_t index, uint32_t token, uint32_t d) const {
        return pool.data() + pages_[index] * page_stride_ + (block_tokens + token) * row_ + d * bytes_of(shape_.dtype);
    }

    template <class Next>
    void fill_query(Next next) {
        for (uint32_t i = 0; i < shape_.group * shape_.dim; ++i) {
            put(query_dtype(shape_.dtype), query_.data() + i * query_bytes_of(shape_.dtype), next());
        }
    }

    void poison(Guarded& pool, uint32_t which) {
        for (size_t i = 0; i < pool.size() / bytes_of(shape_.dtype); ++i) {
            put_poison(shape_.dtype, pool.data() + i * bytes_of(shape_.dtype), which++);
        }
    }

    void attend_in_fp64() {
        out_.assign(shape_.group * shape_.dim, 0.0);
        lse_.assign(shape_.group, -std::numeric_limits<double>::infinity());
        if (shape_.count == 0) {
            return;
        }
        const uint32_t dim = shape_.dim;
        std::vector<std::pair<uint32_t, uint32_t>> counted;
        for (uint32_t index = 0; index < shape_.count; ++index) {
            for (uint32_t token = 0; token < block_tokens; ++token) {
                if (counts(index, token)) counted.push_back({index, token});
            }
        }
        const auto tokens = static_cast<uint32_t>(counted.size());
        if (tokens == 0) {
            return;
        }
        std::vector<double> query(shape_.group * dim), keys(tokens * dim), values(tokens * dim);
        for (uint32_t i = 0; i < query.size(); ++i) {
            query[i] = get(query_dtype(shape_.dtype), query_.data() + i * query_bytes_of(shape_.dtype));
        }
        for (uint32_t token = 0; token < tokens; ++token) {
            for (uint32_t d = 0; d < dim; ++d) {
                const auto [index, within] = counted[token];
                keys[token * dim + d] = get(shape_.dtype, at(keys_, index, within, d));
                values[token * dim + d] = get(shape_.dtype, at(values_, index, within, d));
            }
        }
        std::vector<double> logit(tokens);
        for (uint32_t head = 0; head < shape_.group; ++head) {
            double largest_products = 0;
            for (uint32_t token = 0; token < tokens; ++token) {
                double sum = 0, products = 0;
                for (uint32_t d = 0; d < dim; ++d) {
                    const double product = query[head * dim + d] * keys[token * dim + d];
                    sum += product;
                    products += std::fabs(product);
                }
                logit[token] = sum * scale();
                largest_products = std::max(largest_products, products * scale());
            }
            logit_error_ = std::max(logit_error_, largest_products * 0x1p-22);
            const double highest = *std::max_element(logit.begin(), logit.end());
            double sum = 0;
            for (uint32_t token = 0; token < tokens; ++token) {
                const double weight = std::exp(logit[token] - highest);
                sum += weight;
                for (uint32_t d = 0; d < dim; ++d) {
                    out_[head * dim + d] += weight * values[token * dim + d];
                }
            }
            for (uint32_t d = 0; d < dim; ++d) {
                out_[head * dim + d] /= sum;
            }
            lse_[head] = highest + std::log(sum);
        }
    }

    Shape shape_;
    uint32_t row_;
    uint64_t page_stride_;
    Guarded query_, keys_, values_;
    std::vector<uint32_t> pages_, masks_;
    std::vector<double> out_, lse_;
    double logit_error_ = 0;
};

// -- checks -----------------------------------------------------------------------------------------------------------

constexpr DType dtypes[] = {DType::bf16, DType::fp16, DType::fp32, DType::fp8_bf16, DType::fp8_fp16, DType::fp8_fp32};
constexpr uint32_t head_dims[] = {64, 96, 128, 256};

int failures = 0;
uint32_t every = 1;  // check only every Nth shape: sanitized builds are slow

void fail(const std::string& variant, const std::string& what, const std::string& where) {
    std::printf("FAILED %s: %s: %s\n", variant.c_str(), what.c_str(), where.c_str());
    ++failures;
}

double allowed_error(DType dtype) {
    const DType of_query = query_dtype(dtype);
    return of_query == DType::bf16 ? 1e-2 : of_query == DType::fp16 ? 2e-3 : 1e-5;
}

bool same_bits(const Result& a, const Result& b) {
    return std::memcmp(a.out.data(), b.out.data(), a.out.size() * 4) == 0 &&
           std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0;
}

struct Worst {
    std::map<std::string, Case::Errors> of;  // key: "variant dtype"
    uint32_t cases = 0;
};

void check(const Shape& shape, const std::vector<std::string>& names, Worst& worst) {
    if (shape.seed % every != 0) {
        return;
    }
    const Case one(shape);
    for (const std::string& variant : names) {
        Kernel kernel = find_kernel(shape.dtype, shape.dim, variant.c_str());
        if (kernel == nullptr) {
            fail(variant, "no kernel", describe(shape));
            continue;
        }
        std::string problem;
        const Result result = one.run(kernel, problem);
        ++worst.cases;
        if (!same_bits(result, one.run(kernel, problem, true))) {
            problem = "two runs differ, the second of them with a next call announced";
        }
        if (one.is_empty()) {
            if (!one.left_empty(result)) {
                problem = "an empty list must give lse -inf and leave out alone";
            }
        } else {
            const Case::Errors errors = one.errors_of(result);
            // if logits are so large that their rounding decides, the check is only that nothing overflows
            const double slack = one.logit_error();
            const bool is_finite = std::isfinite(errors.out) && std::isfinite(errors.lse);
            if (!is_finite || !(errors.out <= allowed_error(shape.dtype) + 4 * slack) || !(errors.lse <= 1e-3 + 4 * slack)) {
                char text[100];
                std::snprintf(text, sizeof text, "out off by %.3g (relative), lse by %.3g", errors.out, errors.lse);
                problem = text;
            }
            if (shape.key_size == 1.0f) {
                Case::Errors& most = worst.of[variant + " " + name_of(shape.dtype)];
                most.out = std::max(most.out, errors.out);
                most.lse = std::max(most.lse, errors.lse);
            }
        }
        if (!problem.empty()) {
            fail(variant, problem, describe(shape));
        }
    }
}

void check_shapes(const std::vector<std::string>& names, Worst& worst) {
    std::mt19937 random(1);
    uint32_t seed = 0;
    for (DType dtype : dtypes) {
        for (uint32_t dim : head_dims) {
            for (uint32_t group = 1; group <= max_group; ++group) {
                for (uint32_t count = 0; count <= 12; ++count) {
                    const uint32_t fills[] = {1 + static_cast<uint32_t>(random() % 32), 32, 1, 31, 15, 16, 17};
                    check({dtype, dim, group, count, fills[0], 1.0f, ++seed}, names, worst);
                    if (count < 3) {
                        check({dtype, dim, group, count, fills[1 + random() % 6], 1.0f, ++seed}, names, worst);
                    }
                }
            }
            for (uint32_t last_fill = 1; last_fill <= block_tokens; ++last_fill) {
                check({dtype, dim, 5, 2, last_fill, 1.0f, ++seed}, names, worst);
            }
        }
    }
}

void check_large_logits(const std::vector<std::string>& names, Worst& worst) {
    uint32_t seed = 1000000;
    for (DType dtype : dtypes) {
        for (uint32_t dim : head_dims) {
            for (float key_size : {1e-30f, 1e-3f, 8.0f, 100.0f, 1e4f, 1e10f, 1e30f, 1e35f}) {
                if (dtype == DType::fp16 && key_size > 1e4f) {
                    continue;
                }
                for (uint32_t group : {1u, 5u, 11u}) {
                    check({dtype, dim, group, 3, 7, key_size, ++seed}, names, worst);
                }
            }
        }
    }
}

// Check every kind of mask, also with lists so long that copied tokens or whole blocks are computed in several parts.
void check_masks(const std::vector<std::string>& names, Worst& worst) {
    std::mt19937 random(3);
    uint32_t seed = 2000000;
    for (DType dtype : dtypes) {
        for (uint32_t dim : head_dims) {
            for (Masks masks : {Masks::half, Masks::few, Masks::most, Masks::whole, Masks::empty}) {
                for (uint32_t count : {0u, 1u, 2u, 5u, 9u, 21u}) {
                    const auto group = 1 + static_cast<uint32_t>(random() % max_group);
                    const auto last_fill = 1 + static_cast<uint32_t>(random() % block_tokens);
                    check({dtype, dim, group, count, last_fill, 1.0f, ++seed, masks}, names, worst);
                }
            }
            check({dtype, dim, 4, 150, 3, 1.0f, ++seed, Masks::most}, names, worst);
            check({dtype, dim, 4, 150, 3, 1.0f, ++seed, Masks::whole}, names, worst);
            check({dtype, dim, 3, 4, 9, 100.0f, ++seed, Masks::half}, names, worst);
        }
    }
}

// -- weights, and sums by weights: the halves of attention -----------------------------------------------------------------

// Check sums and weights on one pool of one head that serves as keys and as values. Numbers that must not be used are NaN or
// infinite.
void check_halves(const std::vector<std::string>& names, Worst& worst) {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    uint32_t seed = 0;
    for (DType dtype : dtypes) {
        for (uint32_t dim : head_dims) {
            for (uint32_t count : {0u, 1u, 2u, 7u}) {
                const auto group = 1 + static_cast<uint32_t>(random() % max_group);
                if (++seed % std::min(every, 5u) != 0) continue;
                const uint32_t item = bytes_of(dtype), row = dim * item, tokens = count * block_tokens;
                const uint64_t stride = tokens + 32;  // larger than needed: the kernel must use the stride
                Guarded pool(std::max(1u, tokens) * row), query(group * dim * query_bytes_of(dtype)), out(group * dim * 4);
                std::vector<uint32_t> pages(count + 1), masks(count + 1);
                std::iota(pages.begin(), pages.end(), 0u);
                std::shuffle(pages.begin(), pages.begin() + count, random);
                std::vector<float> weights(group * stride), found(group * stride, 7.0f), lse(group);
                for (uint32_t i = 0; i < pool.size() / item; ++i) put_poison(dtype, pool.data() + i * item, i / dim);
                const auto asked = [&](uint32_t i) { return query.data() + i * query_bytes_of(dtype); };
                for (uint32_t i = 0; i < group * dim; ++i) put(query_dtype(dtype), asked(i), normal(random));
                for (uint32_t& mask : masks) mask = random() % 4 ? static_cast<uint32_t>(random()) : random() % 2 * ~0u;
                const auto at = [&](uint32_t token, uint32_t d) {
                    return pool.data() + ((pages[token / 32] * 32 + token % 32) * dim + d) * item;
                };
                const auto counts = [&](uint32_t token) { return masks[token / 32] >> token % 32 & 1; };
                for (uint32_t token = 0; token < tokens; ++token) {
                    for (uint32_t d = 0; counts(token) && d < dim; ++d) put(dtype, at(token, d), normal(random));
                    for (uint32_t head = 0; head < group; ++head) {
                        // a token may have a weight of 0 for some heads only
                        weights[head * stride + token] = counts(token) && random() % 4 ? normal(random) : 0.0f;
                    }
                }
                for (uint32_t head = 0; head < group; ++head) {
                    lse[head] = head % 5 == 4 ? -std::numeric_limits<float>::infinity() : 2.0f + normal(random);
                }
                const auto where = describe({dtype, dim, group, count, block_tokens, 1.0f, seed});
                const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
                for (const std::string& variant : names) {
                    const SumKernel sum = find_sum_kernel(dtype, dim, variant.c_str());
                    const WeightKernel weigh = find_weight_kernel(dtype, dim, variant.c_str());
                    if (!sum || !weigh) {
                        fail(variant, "no kernel for weights or sums", where);
                        continue;
                    }
                    ++worst.cases;
                    sum({weights.data(), stride, pool.data(), uint64_t{block_tokens} * row, pages.data(), count, group, dim,
                         dtype, reinterpret_cast<float*>(out.data())});
                    weigh({query.data(), pool.data(), nullptr, uint64_t{block_tokens} * row, pages.data(), masks.data(), count,
                           block_tokens, group, dim, dtype, scale, nullptr, lse.data(), nullptr},
                          found.data(), stride);
                    for (uint32_t head = 0; head < group; ++head) {
                        for (uint32_t d = 0; d < dim; ++d) {
                            double expected = 0, size = 0;
                            for (uint32_t token = 0; token < tokens; ++token) {
                                if (!counts(token)) continue;
                                const double product = double{weights[head * stride + token]} * get(dtype, at(token, d));
                                expected += product;
                                size += std::fabs(product);
                            }
                            const float got = reinterpret_cast<const float*>(out.data())[head * dim + d];
                            if (!(std::fabs(got - expected) <= 1e-5 * (1 + size))) return fail(variant, "a wrong sum", where);
                        }
                        for (uint32_t token = 0; token < tokens; ++token) {
                            double logit = 0;
                            for (uint32_t d = 0; counts(token) && d < dim; ++d) {
                                logit += get(query_dtype(dtype), asked(head * dim + d)) * get(dtype, at(token, d));
                            }
                            const double expected = counts(token) ? std::exp(logit * scale - lse[head]) : 0;
                            const double right = std::isinf(lse[head]) ? 0 : expected;
                            const float got = found[head * stride + token];
                            if (!(std::fabs(got - right) <= 1e-4 * right)) return fail(variant, "a wrong weight", where);
                        }
                        if (found[head * stride + tokens] != 7.0f) return fail(variant, "a weight behind the list", where);
                    }
                    if (!out.intact()) fail(variant, "wrote in front of its output", where);
                }
            }
        }
    }
}

// Check a kernel called from four new threads at once: the results must have the bits of a single thread's results.
void check_threads(const std::vector<std::string>& names) {
    for (const std::string& variant : names) {
        for (DType dtype : dtypes) {
            constexpr uint32_t threads = 4, cases = 6;
            const uint32_t rounds = std::max(1u, 50 / every);
            Kernel kernel = find_kernel(dtype, 128, variant.c_str());
            std::vector<std::unique_ptr<Case>> work;
            std::vector<Result> expected;
            std::string problem;
            for (uint32_t i = 0; i < cases; ++i) {
                work.push_back(std::make_unique<Case>(Shape{dtype, 128, 3 + 2 * i, 1 + i, 32 - i, 1.0f, 77 + i}));
                expected.push_back(work.back()->run(kernel, problem));
            }
            std::atomic<uint32_t> wrong = 0;
            std::vector<std::thread> running;
            for (uint32_t thread = 0; thread < threads; ++thread) {
                running.emplace_back([&, thread] {
                    std::string ignored;
                    for (uint32_t i = 0; i < rounds * cases; ++i) {
                        const uint32_t which = (i + thread) % cases;
                        wrong += !same_bits(work[which]->run(kernel, ignored), expected[which]);
                    }
                });
            }
            for (std::thread& thread : running) {
                thread.join();
            }
            if (wrong != 0) {
                fail(variant, "several threads do not get the bits of one", name_of(dtype));
            }
        }
    }
}

void check_dispatch(const std::vector<std::string>& names) {
    const auto expect = [](bool condition, const char* what) {
        if (!condition) {
            fail("dispatch", what, variants());
        }
    };
    expect(names.back() == "portable", "portable must be there, as the last one");
    expect(find_kernel(DType::bf16, 80, nullptr) == nullptr, "head_dim 80 must have no kernel");
    expect(find_kernel(DType::bf16, 128, "sse9") == nullptr, "an unknown variant must have no kernel");
    expect(variant_name(DType::bf16, 128, "sse9") == nullptr, "an unknown variant must have no name");
    for (const std::string& name : names) {
        const bool is_for_bf16 = name == "amx" || name == "neon-bf16";
        expect(variant_name(DType::bf16, 128, name.c_str()) == name, "a variant must have bf16");
        const char* fp32 = variant_name(DType::fp32, 128, name.c_str());
        expect(fp32 != nullptr && (fp32 == name) != is_for_bf16, "fp32 must be with the next simpler variant");
        const bool is_amx = std::strcmp(variant_name(DType::fp8_bf16, 128, name.c_str()), "amx") == 0;
        expect(is_amx == (name == "amx"), "AMX must have FP8 with queries in bf16");
        expect(std::strcmp(variant_name(DType::fp8_fp32, 128, name.c_str()), fp32) == 0, "FP8 must be where fp32 is");
    }
    setenv("SGLANG_HYBRID_CPU_VARIANT", "portable", 1);
    expect(std::strcmp(variant_name(DType::bf16, 128, nullptr), "portable") == 0, "the environment must choose");
    expect(variant_name(DType::bf16, 128, names[0].c_str()) == names[0], "an argument must beat the environment");
    setenv("SGLANG_HYBRID_CPU_VARIANT", "sse9", 1);
    expect(find_kernel(DType::bf16, 128, nullptr) == nullptr, "an unknown name in the environment must not pass");
    unsetenv("SGLANG_HYBRID_CPU_VARIANT");
    expect(variant_name(DType::bf16, 128, nullptr) == names[0], "the first variant must be the default");
}

int check_everything() {
    const std::vector<std::string> names = available_variants();
    Worst worst;
    check_dispatch(names);
    check_shapes(names, worst);
    check_large_logits(names, worst);
    check_masks(names, worst);
    check_halves(names, worst);
    check_threads(names);
    for (const auto& [what, errors] : worst.of) {
        std::printf("%-18s out %.2e  lse %.2e\n", what.c_str(), errors.out, errors.lse);
    }
    std::printf("%u cases, %d failures; variants %s\n", worst.cases, failures, variants());
    return failures == 0 ? 0 : 1;
}

// -- benchmark --------------------------------------------------------------------------------------------------------

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Run body(thread) on all threads at once. Returns the seconds from the first thread's begin to the last thread's end, the
// best of five repetitions.
template <class Body>
double best_time(uint32_t threads, Body body) {
    double best = std::numeric_limits<double>::infinity();
    for (int repetition = 0; repetition < 5; ++repetition) {
        std::barrier start(threads);
        std::vector<double> begin(threads), end(threads);
        std::vector<std::thread> running;
        for (uint32_t thread = 0; thread < threads; ++thread) {
            running.emplace_back([&, thread] {
                start.arrive_and_wait();
                begin[thread] = seconds();
                body(thread);
                end[thread] = seconds();
            });
        }
        for (std::thread& thread : running) {
            thread.join();
        }
        const double first = *std::min_element(begin.begin(), begin.end());
        best = std::min(best, *std::max_element(end.begin(), end.end()) - first);
    }
    return best;
}

// A pool of one layer of bf16, 8 KV heads, head_dim 128: page p holds keys, then values, of all heads.
class BenchPool {
  public:
    static constexpr uint32_t heads = 8, dim = 128, list = 8;
    static constexpr size_t block = block_tokens * dim * 2, page = 2 * heads * block;

    BenchPool(size_t bytes, int advice) : pages_(static_cast<uint32_t>(bytes / page)) {
        void* memory = mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("kernel_check: pool");
            std::exit(2);
        }
        madvise(memory, size(), advice);
        data_ = static_cast<char*>(memory);
        std::mt19937_64 random(3);
        for (size_t i = 0; i < size(); i += 8) {
            // bf16 numbers of either sign with magnitudes from 0.5 to 2
            const uint64_t bits = (random() & 0x80ff80ff80ff80ff) | 0x3f003f003f003f00;
            std::memcpy(data_ + i, &bits, 8);
        }
        for (uint32_t head = 0; head < heads; ++head) {
            for (uint32_t i = 0; i < pages_; ++i) {
                order_.push_back(i);
            }
            std::shuffle(order_.end() - pages_, order_.end(), random);
        }
    }
    BenchPool(const BenchPool&) = delete;
    ~BenchPool() { munmap(data_, size()); }

    size_t size() const { return pages_ * page; }

    // Attend to every block once per pass, so that the pool is in the cache as a whole or not at all. Returns GB/s. `mask`
    // is the mask of every block; blocks count with all their bytes, however few of their tokens count.
    double attend(Kernel kernel, uint32_t group, uint32_t threads, uint32_t passes, uint32_t mask = ~0u) const {
        const std::vector<uint32_t> masks(list, mask);
        const uint32_t lists = static_cast<uint32_t>(order_.size()) / list;
        const double time = best_time(threads, [&](uint32_t thread) {
            alignas(64) char query[max_group * dim * 2];
            std::memcpy(query, data_, sizeof query);
            std::vector<float> out(max_group * dim), lse(max_group);
            const auto work = [&](uint32_t i) {
                const char* keys = data_ + i * list / pages_ * block;
                return BlockAttention{query,
                                      keys,
                                      keys + heads * block,
                                      page,
                                      &order_[i * list],
                                      mask == ~0u ? nullptr : masks.data(),
                                      list,
                                      block_tokens,
                                      group,
                                      dim,
                                      DType::bf16,
                                      0.0884f,
                                      out.data(),
                                      lse.data(),
                                      nullptr};
            };
            const uint32_t begin = lists * thread / threads, end = lists * (thread + 1) / threads;
            for (uint32_t pass = 0; pass < passes; ++pass) {
                BlockAttention current = work(begin);
                for (uint32_t i = begin; i < end; ++i) {
                    const BlockAttention next = work(i + 1 < end ? i + 1 : begin);
                    current.next = &next;
                    sglang_hybrid::attend(kernel, current);
                    current = next;
                }
            }
        });
        return static_cast<double>(lists) * list * 2 * block * passes / time / 1e9;
    }

    // Read the pool front to back `passes` times. Returns GB/s.
    double read(uint32_t threads, uint32_t passes) const {
        std::atomic<uint64_t> sink = 0;
        const double time = best_time(threads, [&](uint32_t thread) {
            const size_t words = size() / 8;
            const auto* data = reinterpret_cast<const uint64_t*>(data_);
            uint64_t sum[8] = {};
            for (uint32_t pass = 0; pass < passes; ++pass) {
                __asm__ volatile("" ::: "memory");
                for (size_t i = words * thread / threads / 8 * 8; i < words * (thread + 1) / threads / 8 * 8; i += 8) {
                    for (size_t lane = 0; lane < 8; ++lane) {
                        sum[lane] ^= data[i + lane];
                    }
                }
            }
            for (uint64_t part : sum) {
                sink += part;
            }
        });
        return static_cast<double>(size()) * passes / time / 1e9;
    }

  private:
    uint32_t pages_;
    char* data_;
    std::vector<uint32_t> order_;
};

int bench(uint32_t threads, uint32_t group, const std::string& only) {
    const BenchPool in_l2(size_t{1} << 20, MADV_NOHUGEPAGE);
    const BenchPool small_pages(size_t{2} << 30, MADV_NOHUGEPAGE);
    const BenchPool huge_pages(size_t{2} << 30, MADV_HUGEPAGE);
    std::printf("bf16 head_dim 128 group %u, lists of 8 random blocks, %u threads; GB/s, best of 5\n", group, threads);
    std::printf("%-24s %10s %14s %14s\n", "", "1 MiB", "2 GiB, 4 KiB p.", "2 GiB, huge p.");
    const auto print = [](const std::string& name, double l2, double small, double huge) {
        std::printf("%-24s %10.2f %14.2f %14.2f\n", name.c_str(), l2, small, huge);
    };
    const auto print_read = [&] {
        print("sequential read", in_l2.read(1, 200), small_pages.read(threads, 1), huge_pages.read(threads, 1));
    };
    print_read();
    for (const std::string& variant : available_variants()) {
        if (only.empty() || only == variant) {
            Kernel kernel = find_kernel(DType::bf16, BenchPool::dim, variant.c_str());
            // all tokens; all but one; every second token; one of eight tokens
            for (const uint32_t mask : {~0u, ~0u - 1, 0x55555555u, 0x01010101u}) {
                char name[40];
                std::snprintf(name, sizeof name, mask == ~0u ? "%s" : "%s, %d of 32", variant.c_str(), std::popcount(mask));
                print(name, in_l2.attend(kernel, group, 1, 200, mask), small_pages.attend(kernel, group, threads, 1, mask),
                      huge_pages.attend(kernel, group, threads, 1, mask));
            }
        }
    }
    print_read();
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    if (count > 1 && std::strcmp(arguments[1], "--bench") == 0) {
        const int threads = count > 2 ? std::atoi(arguments[2]) : 1;
        const int group = count > 3 ? std::atoi(arguments[3]) : 5;
        if (threads < 1 || group < 1 || group > static_cast<int>(max_group)) {
            std::fprintf(stderr, "usage: kernel_check --bench [threads] [group, 1 to 16] [variant]\n");
            return 2;
        }
        return bench(static_cast<uint32_t>(threads), static_cast<uint32_t>(group), count > 4 ? arguments[4] : "");
    }
    if (count > 1) {
        const int step = count == 3 && std::strcmp(arguments[1], "--every") == 0 ? std::atoi(arguments[2]) : 0;
        if (step < 1) {
            std::fprintf(stderr, "usage: kernel_check [--every N | --bench [threads] [group, 1 to 16] [variant]]\n");
            return 2;
        }
        every = static_cast<uint32_t>(step);
    }
    return check_everything();
}
