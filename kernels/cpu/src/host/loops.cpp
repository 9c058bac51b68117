#include "host/loops.h"

#include <cstring>

namespace sglang_hybrid {

const HostLoops& host_loops() {
#if defined(__x86_64__)
    // follow the choice of kernels, which depends on the machine and on SGLANG_HYBRID_CPU_VARIANT
    const char* const chosen = variant_name(DType::fp32, 64, nullptr);
    if (chosen && std::strcmp(chosen, "avx512") == 0) return avx512_loops;
    if (chosen && std::strcmp(chosen, "avx2") == 0) return avx2_loops;
#endif
    return portable_loops;
}

}  // namespace sglang_hybrid
