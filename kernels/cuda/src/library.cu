// Functions without kernels: registered host memory, errors, and the sizes by which Python checks its structs.
#include <cstring>

#include "launching.h"
#include "sglang_hybrid/cuda/c_api.h"
#include "sglang_hybrid/cuda/dense_api.h"
#include "sglang_hybrid/cuda/kept_tokens_api.h"
#include "sglang_hybrid/cuda/lanes_api.h"
#include "sglang_hybrid/cuda/prefill_api.h"
#include "sglang_hybrid/cuda/salience_api.h"
#include "sglang_hybrid/cuda/selection_api.h"
#include "sglang_hybrid/cuda/speculation_api.h"
#include "sglang_hybrid/cuda/weights_api.h"

// Make host memory readable and writable for the device, and write its device address to `device_address`.
SH_CUDA_API int sh_cuda_register(void* memory, uint64_t bytes, void** device_address) {
    const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (error) {
        cudaGetLastError();  // clears the error, which the next launch would report
        return error;
    }
    return cudaHostGetDevicePointer(device_address, memory, 0);
}

SH_CUDA_API int sh_cuda_unregister(void* memory) {
    const cudaError_t error = cudaHostUnregister(memory);
    if (error) cudaGetLastError();
    return error;
}

SH_CUDA_API const char* sh_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Return the bytes of a struct of one of the headers above, 0 if there is none of that name.
SH_CUDA_API uint64_t sh_cuda_bytes_of(const char* name) {
    const struct {
        const char* name;
        uint64_t bytes;
    } structs[] = {
        {"sh_attend_slots", sizeof(sh_attend_slots)},
        {"sh_merge", sizeof(sh_merge)},
        {"sh_gather_blocks", sizeof(sh_gather_blocks)},
        {"sh_mailbox_state", sizeof(sh_mailbox_state)},
        {"sh_receipt", sizeof(sh_receipt)},
        {"sh_mailbox_post", sizeof(sh_mailbox_post)},
        {"sh_mailbox_wait", sizeof(sh_mailbox_wait)},
        {"sh_append", sizeof(sh_append)},
        {"sh_digest_pages", sizeof(sh_digest_pages)},
        {"sh_score_blocks", sizeof(sh_score_blocks)},
        {"sh_share_scores", sizeof(sh_share_scores)},
        {"sh_select_blocks", sizeof(sh_select_blocks)},
        {"sh_apply_plan", sizeof(sh_apply_plan)},
        {"sh_shift_lse", sizeof(sh_shift_lse)},
        {"sh_unit_rms", sizeof(sh_unit_rms)},
        {"sh_finish_queries", sizeof(sh_finish_queries)},
        {"sh_place_tokens", sizeof(sh_place_tokens)},
        {"sh_scatter_blocks", sizeof(sh_scatter_blocks)},
        {"sh_copy_runs", sizeof(sh_copy_runs)},
        {"sh_finish_late", sizeof(sh_finish_late)},
        {"sh_begin_step", sizeof(sh_begin_step)},
        {"sh_hold_rows", sizeof(sh_hold_rows)},
        {"sh_let_rows_go", sizeof(sh_let_rows_go)},
        {"sh_move_held", sizeof(sh_move_held)},
        {"sh_attend_pages", sizeof(sh_attend_pages)},
        {"sh_contextual_sets", sizeof(sh_contextual_sets)},
        {"sh_move_averages", sizeof(sh_move_averages)},
        {"sh_encode_partial_keys", sizeof(sh_encode_partial_keys)},
        {"sh_speculate", sizeof(sh_speculate)},
        {"sh_choose_tokens", sizeof(sh_choose_tokens)},
        {"sh_gather_tokens", sizeof(sh_gather_tokens)},
        {"sh_lookup_logits", sizeof(sh_lookup_logits)},
        {"sh_cumulative_share", sizeof(sh_cumulative_share)},
        {"sh_key_codes", sizeof(sh_key_codes)},
        {"sh_encode_keys", sizeof(sh_encode_keys)},
        {"sh_token_logits", sizeof(sh_token_logits)},
        {"sh_keep_tokens", sizeof(sh_keep_tokens)},
        {"sh_finish_sums", sizeof(sh_finish_sums)},
    };
    for (const auto& one : structs) {
        if (!std::strcmp(one.name, name)) return one.bytes;
    }
    return 0;
}
