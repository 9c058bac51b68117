// Numbers of heads that are known only at run time, as constants: sums of that many heads can then stay in registers.
#pragma once

#include <stdint.h>

namespace sglang_hybrid {
namespace {

template <uint32_t number>
struct Constant {
    static constexpr uint32_t value = number;
};

// body(Constant<number>) for a number between 1 and limit that is known only at run time
template <uint32_t limit, class Body>
inline void with_constant(uint32_t number, Body body) {
    if constexpr (limit > 1) {
        if (number < limit) {
            return with_constant<limit - 1>(number, body);
        }
    }
    body(Constant<limit>());
}

// body(first head, Constant<heads>) for the whole group in parts of nearly equal size, each at most `limit`
template <uint32_t limit, class Body>
inline void in_parts(uint32_t group, Body body) {
    uint32_t first = 0;
    for (uint32_t parts = (group + limit - 1) / limit; parts > 0; --parts) {
        const uint32_t heads = (group - first + parts - 1) / parts;
        with_constant<limit>(heads, [&](auto constant) { body(first, constant); });
        first += heads;
    }
}

}  // namespace
}  // namespace sglang_hybrid
