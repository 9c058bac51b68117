"""Everything that touches SGLang's internals, one file per concern.

    versions             which SGLang this code is tested with
    hooks                the table of hooks, their registration and verification
    activate             the plugin, loaded and verified: for our own launchers
    server_args          command line and defaults
    refusals             what cannot be served, and what to change
    rank_cores           cores of each rank on a host without a GPU
    pools                capacity, host pool and allocator, in place of SGLang's
    host_kv_pool         SGLang's KV pool, in host memory
    cpu_allocator        SGLang's page allocator, without Triton
    load_snapshot        SGLang's load file in /dev/shm, replaced by one that leaves nothing behind
    console_events       what the launcher's console shows: model, pool, worker, batches
    server_metrics       when metrics are published: batches, idleness, the pool's use
    server_info          the effective settings in /get_server_info
    backend_of           our attention backend, from SGLang's scheduler
    memory_kinds         what kind of memory the KV cache is, for NIXL
    triton_gates         SGLang's "may I use Triton" questions, answered for a CPU
    attention_backend    SGLang's attention interface, handing over to an engine
    create_engines       which engine that is, and what it has to know about the model
    decoder_layers       the decoder layers of Llama-like models: their inputs, what makes their queries
    record_keys          keys of a text, as the KV pool gets them
    predictor            hooks in front of them that look one layer ahead
    channels             which channels of the keys are worth a sketch
    model_session        SGLang's model runner, decoding behind one prefill in many ways
    session_flags        the command line of commands that load a model themselves
    cpu_host/            what SGLang lacks on a host without a GPU

The rest of the package knows tensors, pages and rows, not SGLang.
"""

BACKEND_NAME = "hybrid"
