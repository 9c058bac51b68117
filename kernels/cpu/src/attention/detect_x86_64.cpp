#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attention/variants.h"

namespace sglang_hybrid {
namespace {

struct Cpuid {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;

    Cpuid(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

constexpr bool has(uint32_t flags, uint32_t wanted) { return (flags & wanted) == wanted; }

constexpr uint32_t bit(uint32_t index) { return 1u << index; }

uint32_t state_saved_by_system() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Ask Linux for the 8 KiB of tile state, which a process may use only after asking. Returns false if Linux refuses, for
// example because a signal stack is too small for the state.
bool request_tiles() {
    constexpr long arch_req_xcomp_perm = 0x1023;
    constexpr long tile_data = 18;
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}

struct Machine {
    bool avx2 = false;
    bool avx512 = false;
    bool amx = false;

    Machine() {
        constexpr uint32_t fma = bit(12), osxsave = bit(27), avx = bit(28), f16c = bit(29);
        const Cpuid basic(1, 0), extended(7, 0);
        if (!has(basic.ecx, osxsave | avx)) {
            return;
        }
        const uint32_t saved = state_saved_by_system();
        constexpr uint32_t ymm = bit(1) | bit(2), zmm = ymm | bit(5) | bit(6) | bit(7), tiles = bit(17) | bit(18);

        avx2 = has(saved, ymm) && has(basic.ecx, fma | f16c) && has(extended.ebx, bit(5));
        constexpr uint32_t f = bit(16), dq = bit(17), bw = bit(30), vl = bit(31);
        avx512 = avx2 && has(saved, zmm) && has(extended.ebx, f | dq | bw | vl);
        constexpr uint32_t amx_bf16 = bit(22), amx_tile = bit(24);
        amx = avx512 && has(saved, tiles) && has(extended.edx, amx_bf16 | amx_tile) && request_tiles();
    }
};

}  // namespace

VariantList known_variants() {
    static const Machine machine;
    static const Variant list[] = {
        {"amx", amx_kernel, nullptr, nullptr, machine.amx},
        {"avx512", avx512_kernel, avx512_sum_kernel, avx512_weight_kernel, machine.avx512},
        {"avx2", avx2_kernel, avx2_sum_kernel, avx2_weight_kernel, machine.avx2},
        {"portable", portable_kernel, portable_sum_kernel, portable_weight_kernel, true},
    };
    return {list, sizeof list / sizeof *list};
}

}  // namespace sglang_hybrid
