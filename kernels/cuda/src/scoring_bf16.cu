#include "score_launch.h"

template cudaError_t launch_score<sglang_hybrid::cuda::BFloat16>(const sh_score_blocks&, cudaStream_t);
