// Turns a number of heads known only at run time into compile-time constants, so that the sums of all these heads can stay in
// registers.
#pragma once

#include <stdint.h>

namespace sglang_hybrid {
namespace {

template <uint32_t number>
struct Constant {
    static constexpr uint32_t value = number;
};

// Call body(Constant<number>()) for a `number` from 1 to `limit` that is known only at run time.
template <uint32_t limit, class Body>
inline void with_constant(uint32_t number, Body body) {
    if constexpr (limit > 1) {
        if (number < limit) {
            return with_constant<limit - 1>(number, body);
        }
    }
    body(Constant<limit>());
}

// A number of heads, divided into parts of nearly equal size, each of at most `limit` heads.
template <uint32_t limit>
class GroupParts {
  public:
    GroupParts() = default;
    explicit GroupParts(uint32_t group) : count_((group + limit - 1) / limit), size_(group / count_), larger_(group % count_) {}

    uint32_t count() const { return count_; }

    // Call body(first head, Constant<heads>()) for each part.
    template <class Body>
    void each(Body body) const {
        uint32_t first = 0;
        for (uint32_t part = 0; part < count_; ++part) {
            const uint32_t heads = size_ + (part < larger_);
            with_constant<limit>(heads, [&](auto constant) { body(first, constant); });
            first += heads;
        }
    }

  private:
    uint32_t count_;
    uint32_t size_;
    uint32_t larger_;  // the first parts have one head more
};

}  // namespace
}  // namespace sglang_hybrid
