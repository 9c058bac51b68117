#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "attention/variants.h"

#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif

namespace sglang_hybrid {

VariantList known_variants() {
    static const bool simd = (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0;
    static const bool bf16 = simd && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
    static const Variant list[] = {
        {"neon-bf16", neon_bf16_kernel, nullptr, nullptr, bf16},
        {"neon", neon_kernel, neon_sum_kernel, neon_weight_kernel, simd},
        {"portable", portable_kernel, portable_sum_kernel, portable_weight_kernel, true},
    };
    return {list, sizeof list / sizeof *list};
}

}  // namespace sglang_hybrid
