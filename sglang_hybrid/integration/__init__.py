"""Everything that touches SGLang's internals, one file per concern.

    versions               SGLang versions that this code is tested with
    hooks                  the table of hooks, their registration and verification
    activate               loads and verifies the plugin, for our own launchers
    server_args            SGLang's command line: our flags, defaults and refusals
    refusals               settings and models that cannot be served, and what to change
    rank_cores             cores of each rank on a host without a GPU
    ranks                  rank and replica of a process, and agreement among ranks
    scheduler_cores        keeps the scheduler off its worker's cores
    gpu_node               the NUMA node of a process's GPU
    pools                  capacity, host pool and allocator, in place of SGLang's
    host_kv_pool           SGLang's KV pool, in host memory
    cpu_allocator          SGLang's page allocator, without Triton
    kv_scales              scales of an FP8 KV cache: the checkpoint's k_scale and v_scale
    load_snapshot          SGLang's load file in /dev/shm, replaced by one that leaves nothing behind
    console_events         what the launcher's console shows: model, pool, worker, batches
    server_metrics         publishes metrics when batches begin and when the server is idle
    server_info            the effective settings in /get_server_info
    backend_of             finds our attention backend in SGLang's scheduler
    memory_kinds           tells NIXL in which kind of memory the KV cache is
    triton_gates           answers SGLang whether Triton kernels may be used
    attention_backend      SGLang's attention interface: passes batches to an engine
    create_engines         chooses the engine, and collects what it has to know about the model
    decode_graphs          records and chooses the CUDA graphs of decode steps
    miss_server            creates what serves misses: the CPU worker, or this process
    arrivals               admits pages that a prefill instance has written, before their request decodes
    weight_updates         updates of weights while the server runs
    decoder_layers         the decoder layers of Llama-like models: their inputs, and the weights of their queries
    plain_weights          weights of projections as plain matrices, also of quantised ones
    record_keys            records the keys of a text, as the KV pool stores them
    predictor              hooks in front of the decoder layers, which predict queries one layer ahead
    automatic_calibration  finds a cached calibration of the model, or calibrates and caches it
    calibrate              fits the query predictor by running a text through the loaded model
    causal_forward         runs a text through the first layers of the model, without a KV cache
    channels               chooses the key channels that sketches store
    key_bases              chooses the bases of partial keys, for policy infinigen
    slot_steps             a rank's steps of the 8-bit codes of keys and values in slots
    slot_dtype             whether slots keep such codes, once the model is known
    model_session          a loaded model without a server: one prefill, then decoding with various settings
    module_times           times of modules, for profiles
    session_flags          SGLang's command line, for commands that load a model themselves
    cpu_host/              stand-ins for what SGLang lacks on a host without a GPU

The rest of the package knows tensors, pages and rows, not SGLang.
"""

BACKEND_NAME = "hybrid"
