"""Rules about which packages may import which, and about policies' names. They are read from the sources."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from sglang_hybrid.policies.registry import loaded_policies

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("sglang_hybrid.protocol", "sglang_hybrid.ops.cpu")  # imported by the server and by the worker's process
# modules that the shared packages may import, and that know neither side
FOUNDATION = (
    "sglang_hybrid",
    *(f"sglang_hybrid.{name}" for name in ("blocks", "env", "trusted_file", "user_cache", "ops", "ops.reference")),
)
# modules outside integration/ that import SGLang: its entry point, and launchers whose main module is SGLang's
SGLANG_OUTSIDE = {"sglang_hybrid.plugin", "sglang_hybrid.server"}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in (path for room in ("sglang_hybrid", "cpu_worker") for path in (ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(body: list[ast.stmt], *, deferred: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports in ``body``, without those under TYPE_CHECKING; with ``deferred`` also those in functions."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse, deferred=deferred)
        elif deferred or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, block, []), deferred=deferred)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body, deferred=deferred)


@functools.cache
def imported_names(module: str, *, deferred: bool = True) -> frozenset[str]:
    """Return all that a module imports: modules of this repository, and other modules as they are named there."""
    names = set()
    for node in statements(ast.parse(modules()[module].read_text()).body, deferred=deferred):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
            names |= inside or {node.module}
    return frozenset(names - {module})


def is_in(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def test_no_module_imports_itself_through_others() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for other in sorted(imported_names(module, deferred=False) & modules().keys()):
            visit(other, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_the_worker_imports_the_shared_rooms_only() -> None:
    for module in (name for name in modules() if is_in(name, ("cpu_worker",))):
        ours = {name for name in imported_names(module) if is_in(name, ("sglang_hybrid",))}
        assert {name for name in ours if not is_in(name, SHARED)} <= {"sglang_hybrid"}, module  # only for the version


def test_the_server_imports_nothing_of_the_worker() -> None:
    for module in (name for name in modules() if is_in(name, ("sglang_hybrid",))):
        assert not {name for name in imported_names(module) if is_in(name, ("cpu_worker",))}, module


def test_the_shared_rooms_know_neither_side() -> None:
    for module in (name for name in modules() if is_in(name, SHARED)):
        ours = {name for name in imported_names(module) if is_in(name, ("sglang_hybrid", "cpu_worker"))}
        assert {name for name in ours if not is_in(name, SHARED)} <= set(FOUNDATION), module


def test_sglang_is_imported_by_its_adapter_only() -> None:
    for module in (name for name in modules() if not is_in(name, ("sglang_hybrid.integration",))):
        if any(is_in(name, ("sglang",)) for name in imported_names(module)):
            assert module in SGLANG_OUTSIDE or module.startswith("sglang_hybrid.bench_"), module


def test_no_policy_is_compared_by_its_name() -> None:
    """The registry declares what differs between policies. Only experiments of papers are about named ones."""
    names = {policy.name for policy in loaded_policies()}
    rooms = ("sglang_hybrid.policies", "sglang_hybrid.commands.report")
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())) if not is_in(module, rooms) else ():
            if not isinstance(node, ast.Compare) or "policy" not in ast.unparse(node):
                continue
            compared = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            assert not compared & names, f"{module}: {ast.unparse(node)}"
