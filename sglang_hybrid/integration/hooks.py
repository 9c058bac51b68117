"""The hooks into SGLang: one table, registered together, verified together.

SGLang's hook registry logs a hook that it cannot apply and goes on. A server that half
works is worse than one that does not start, so ``verify`` looks at what is really there.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hybrid.integration import (
    arrivals,
    console_events,
    decode_graphs,
    load_snapshot,
    memory_kinds,
    pools,
    refusals,
    server_args,
    server_info,
    server_metrics,
    triton_gates,
    weight_updates,
)
from sglang_hybrid.integration.versions import NEWEST_TESTED, OLDEST_TESTED, installed_sglang

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_DECODE = "sglang.srt.disaggregation.decode"
_DECODE_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


class HookError(RuntimeError):
    """A hook is not in place. The server must not start."""


@dataclass(frozen=True)
class Hook:
    target: str
    kind: HookType
    function: Callable[..., Any]


@functools.cache
def all_hooks() -> tuple[Hook, ...]:
    return (
        Hook(f"{_SERVER_ARGS}.add_cli_args", HookType.AFTER, server_args.add_flags),
        Hook(f"{_SERVER_ARGS}.from_cli_args", HookType.BEFORE, server_args.export_flags),
        Hook(f"{_SERVER_ARGS}.{server_args.resolution_method()}", HookType.AROUND, server_args.resolve),
        Hook(f"{_CONFIGURATOR}.configure", HookType.AROUND, pools.configure),
        Hook(f"{_CONFIGURATOR}._profile_available_bytes", HookType.AROUND, pools.available_bytes),
        Hook(f"{_CONFIGURATOR}._build_mha_kv_pool", HookType.AROUND, pools.build_kv_pool),
        Hook(f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator", HookType.AROUND, pools.build_allocator),
        Hook(f"{_DECODE}.DecodePreallocQueue._create_receiver_and_enqueue", HookType.AROUND, arrivals.create_receiver),
        Hook(
            f"{_DECODE}.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch", HookType.AFTER, arrivals.reset_rows
        ),
        Hook(f"{_SCHEDULER}.on_idle", HookType.AFTER, arrivals.wait_for_pages),
        Hook(f"{_SCHEDULER}.run_batch", HookType.BEFORE, console_events.batch_begins),
        Hook(f"{_SCHEDULER}.on_idle", HookType.BEFORE, console_events.scheduler_is_idle),
        Hook(f"{_SCHEDULER}.run_batch", HookType.BEFORE, server_metrics.batch_begins),
        Hook(f"{_SCHEDULER}.on_idle", HookType.BEFORE, server_metrics.scheduler_is_idle),
        Hook(f"{_SCHEDULER}.get_internal_state", HookType.AFTER, server_info.add_settings),
        Hook(f"{_DECODE_GRAPHS}.capture_one_shape", HookType.AROUND, decode_graphs.capture_one_shape),
        Hook(f"{_DECODE_GRAPHS}._make_graph_key", HookType.AROUND, decode_graphs.make_graph_key),
        Hook(
            "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__",
            HookType.BEFORE,
            memory_kinds.tell_memory_kinds,
        ),
        Hook(
            "sglang.srt.disaggregation.common.conn.CommonKVSender.__init__",
            HookType.AFTER,
            memory_kinds.send_without_pinned_memory,
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
            HookType.BEFORE,
            refusals.refuse_request,
        ),
        Hook("sglang.srt.managers.load_snapshot.shm_path_for", HookType.AROUND, load_snapshot.shm_path_for),
        *(
            Hook(f"{weight_updates.UPDATER}.{method}", HookType.AROUND, weight_updates.update)
            for method in weight_updates.methods_that_load()
        ),
        *(
            Hook(f"{weight_updates.UPDATER}.{method}", HookType.AFTER, weight_updates.session_ended)
            for method in weight_updates.methods_that_finish()
        ),
        Hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", HookType.AROUND, pools.enable_fused_set_kv_buffer),
        Hook("sglang.srt.utils.common.support_triton", HookType.AROUND, triton_gates.support_triton),
        Hook("sglang.srt.mem_cache.allocation.get_last_loc", HookType.AROUND, triton_gates.get_last_loc),
    )


def register() -> None:
    for hook in all_hooks():
        if hook not in _registered():
            HookRegistry.register(hook.target, hook.function, hook.kind)


def verify() -> None:
    """Raise HookError unless every hook wraps its target now."""
    missing = [hook.target for hook in all_hooks() if not _in_place(hook)]
    if missing:
        raise HookError(
            f"sglang {installed_sglang()} did not take these hooks of sglang-hybrid: {', '.join(missing)}. "
            f"Tested versions are {OLDEST_TESTED} to {NEWEST_TESTED}; the log above says why each one failed"
        )


def _registered() -> set[Hook]:
    return {
        Hook(target, kind, function)
        for target, entries in HookRegistry._hooks.items()
        for kind, function, _source in entries
    }


def _in_place(hook: Hook) -> bool:
    """Return True if calling the target runs the hook: a wrapper of the target then holds the hook in its closure."""
    try:
        found = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    found = getattr(found, "__func__", found)
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
