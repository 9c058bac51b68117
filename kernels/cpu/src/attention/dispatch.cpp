#include <cstdlib>
#include <cstring>
#include <string>

#include "attention/variants.h"

namespace sglang_hybrid {
namespace {

template <class Kernel>
struct Choice {
    Kernel kernel = nullptr;
    const char* name = nullptr;
};

// Return the kernel for a shape and the name of its variant, as find_kernel describes. `operation`: the member of Variant that
// finds the kernel.
template <class Kernel>
Choice<Kernel> choose(Kernel (*Variant::*operation)(DType, uint32_t), DType dtype, uint32_t head_dim, const char* wanted) {
    if (wanted == nullptr) {
        wanted = std::getenv("SGLANG_HYBRID_CPU_VARIANT");
        if (wanted != nullptr && *wanted == '\0') {
            wanted = nullptr;
        }
    }
    const VariantList list = known_variants();
    bool reached = wanted == nullptr;
    for (const Variant* variant = list.first; variant != list.first + list.count; ++variant) {
        if (!reached && std::strcmp(variant->name, wanted) == 0) {
            if (!variant->available) {
                return {};
            }
            reached = true;
        }
        if (reached && variant->available && variant->*operation) {
            if (Kernel kernel = (variant->*operation)(dtype, head_dim)) {
                return {kernel, variant->name};
            }
        }
    }
    return {};
}

std::string available_names() {
    std::string names;
    const VariantList list = known_variants();
    for (const Variant* variant = list.first; variant != list.first + list.count; ++variant) {
        if (variant->available) {
            names += names.empty() ? "" : ",";
            names += variant->name;
        }
    }
    return names;
}

}  // namespace

Kernel find_kernel(DType dtype, uint32_t head_dim, const char* variant) {
    return choose(&Variant::kernel, dtype, head_dim, variant).kernel;
}

SumKernel find_sum_kernel(DType dtype, uint32_t head_dim, const char* variant) {
    return choose(&Variant::sum_kernel, dtype, head_dim, variant).kernel;
}

WeightKernel find_weight_kernel(DType dtype, uint32_t head_dim, const char* variant) {
    return choose(&Variant::weight_kernel, dtype, head_dim, variant).kernel;
}

const char* variant_name(DType dtype, uint32_t head_dim, const char* variant) {
    return choose(&Variant::kernel, dtype, head_dim, variant).name;
}

const char* variants() {
    static const std::string names = available_names();
    return names.c_str();
}

}  // namespace sglang_hybrid
