#include "attention/variants.h"

namespace sglang_hybrid {

VariantList known_variants() {
    static const Variant portable = {"portable", portable_kernel, portable_sum_kernel, portable_weight_kernel, true};
    return {&portable, 1};
}

}  // namespace sglang_hybrid
