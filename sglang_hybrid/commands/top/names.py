"""Names of the metrics that ``top`` shows: this package's (``sglang_hybrid/metrics/table.py``) and SGLang's own.

Any metric of this package may be missing: an engine exports what it has, and older servers know fewer names.
"""

from __future__ import annotations

from typing import Final

HYBRID: Final = "sglang_hybrid_"  # prefix of this package's metrics

MISS_ROWS: Final = "sglang_hybrid_miss_rows_total"
WORKER_UP: Final = "sglang_hybrid_worker_up"
WORKER_STARTS: Final = "sglang_hybrid_worker_starts_total"
DEGRADED: Final = "sglang_hybrid_degraded"
CPU_RATIO: Final = "sglang_hybrid_cpu_compute_ratio"
LAYER_CPU_RATIO: Final = "sglang_hybrid_layer_cpu_compute_ratio"
LAYER_RECALL_INTERVAL: Final = "sglang_hybrid_layer_recall_interval_steps"
HIT_RATIO: Final = "sglang_hybrid_resident_hit_ratio"
WORKER_WAIT: Final = "sglang_hybrid_worker_wait_seconds"
MISS_BLOCKS: Final = "sglang_hybrid_miss_blocks_total"
MISS_BYTES: Final = "sglang_hybrid_miss_bytes_total"
RECALL_BYTES: Final = "sglang_hybrid_recall_bytes_total"
DECODE_STEP: Final = "sglang_hybrid_decode_step_seconds"
DECODE_ROWS: Final = "sglang_hybrid_decode_rows"
POOL_USED: Final = "sglang_hybrid_host_pool_used_bytes"
POOL: Final = "sglang_hybrid_host_pool_bytes"
SLOTS_USED: Final = "sglang_hybrid_slots_used"
SLOTS: Final = "sglang_hybrid_slots"
WHOLE_REQUESTS: Final = "sglang_hybrid_whole_requests"
COSINE: Final = "sglang_hybrid_calibration_cosine"
INFO: Final = "sglang_hybrid_info"

RUNNING: Final = "sglang:num_running_reqs"
QUEUED: Final = "sglang:num_queue_reqs"
THROUGHPUT: Final = "sglang:gen_throughput"  # a mean over SGLang's log interval, 40 decode steps by default
TOKENS: Final = "sglang:realtime_tokens_total"  # with mode="decode"; preferred to THROUGHPUT, because it is more recent

HISTOGRAMS: Final = (WORKER_WAIT, DECODE_STEP)
COUNTERS: Final = (MISS_ROWS, WORKER_STARTS, MISS_BLOCKS, MISS_BYTES, RECALL_BYTES, TOKENS)
SHOWN: Final = (
    RUNNING, QUEUED, THROUGHPUT, MISS_ROWS, WORKER_UP, WORKER_STARTS, DEGRADED, CPU_RATIO, LAYER_CPU_RATIO,
    LAYER_RECALL_INTERVAL, HIT_RATIO, WORKER_WAIT, MISS_BLOCKS, MISS_BYTES, RECALL_BYTES, DECODE_STEP, DECODE_ROWS,
    POOL_USED, POOL, SLOTS_USED, SLOTS, WHOLE_REQUESTS, COSINE, INFO,
)  # fmt: skip
