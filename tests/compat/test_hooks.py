"""The hook self-test: every hook is in place, on whichever SGLang is installed."""

from __future__ import annotations

import inspect
import re

import pytest
from packaging.version import Version

from sglang_hybrid.integration import BACKEND_NAME, hooks, versions


def test_every_hook_is_in_place() -> None:
    hooks.verify()


@pytest.mark.parametrize("hook", hooks.all_hooks(), ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_a_hook_that_is_taken_away_is_noticed(hook: hooks.Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    import pkgutil

    owner, _, name = hook.target.rpartition(".")
    wrapper = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    function = getattr(wrapper, "__func__", wrapper)
    plain = function.__wrapped__
    restored = type(wrapper)(plain) if isinstance(wrapper, classmethod | staticmethod) else plain
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, restored)
    with pytest.raises(hooks.HookError, match=name):
        hooks.verify()


def test_the_backend_is_registered_under_its_name() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    assert BACKEND_NAME in ATTENTION_BACKENDS
    assert ATTENTION_BACKEND_CHOICES.count(BACKEND_NAME) == 1


def test_registering_twice_changes_nothing() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_hybrid import plugin

    before = {target: len(entries) for target, entries in HookRegistry._hooks.items()}
    plugin.register()
    assert {target: len(entries) for target, entries in HookRegistry._hooks.items()} == before


def test_the_pool_overrides_methods_that_exist() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_hybrid.integration.host_kv_pool import HostKVPool

    # if SGLang renamed a method, ours would not be called and the cache would be on the device
    for name in ("_create_buffers_normal", "_store_kv_layer", "get_cpu_copy", "load_cpu_copy"):
        assert name in vars(MHATokenToKVPool)
        assert name in vars(HostKVPool)


def test_the_installed_sglang_is_within_the_tested_range() -> None:
    versions.check_sglang_version()


_AFTER = Version(versions.NEWEST_TESTED).micro + 1


@pytest.mark.parametrize("version", ["0.5.16", f"0.5.{_AFTER}", "0.6.0"])
def test_another_sglang_is_refused_with_the_range_and_the_override(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_sglang", lambda: Version(version))
    known = re.escape(f"{versions.OLDEST_TESTED} to {versions.NEWEST_TESTED}")
    with pytest.raises(versions.UntestedSGLang, match=f"{known}.*SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG=1"):
        versions.check_sglang_version()
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", "1")
    versions.check_sglang_version()
