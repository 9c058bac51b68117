"""One process of gpu_gates.py: loads the model with one backend, then records logits of every case and variant.

    python -m bench.gates.child SPEC     SPEC: a file with bench.gates.spec.Spec in JSON

The stock process computes first and writes the tokens that all other processes are fed. The others load meanwhile, wait
for this file, and compute in turns. Loading takes longest, so all processes load at once; but no process shares the GPU
or the cores while it computes. Lines that begin with MARK are for the parent's terminal.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gates.spec import MARK, Spec, write_whole

Case = dict[str, Any]


def say(text: str) -> None:
    print(f"{MARK}{text}", flush=True)


def wait_for(path: Path, seconds: float) -> Any:
    """Wait until another process has written the JSON file ``path``, and return the content. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} was not there after {seconds:.0f} s")
        time.sleep(0.2)
    return json.loads(path.read_text())


def read_case(session: Any, prompts: list[list[int]], steps: int, reference: Case | None) -> Case:
    """Decode ``steps`` tokens and return what was read of their logits: lists ``[row][step]`` by name.

    Without ``reference`` decoding is greedy; otherwise every step is fed the reference's tokens. ``logprob``, ``gap``
    and ``logit`` are those of the reference's best token.
    """
    prefilled = session.prefill(prompts)
    logits, columns = prefilled.logits, []
    for position in range(steps):
        # read all that is needed now: a CUDA graph overwrites the logits in the next step
        if reference is None:
            top = logits.topk(2, dim=1)
            token, second, best = top.indices[:, 0], top.indices[:, 1], top.indices[:, 0]
        else:
            token, second = (
                torch.tensor([row[position] for row in reference[name]], device=logits.device)
                for name in ("best", "second")
            )
            best = logits.argmax(dim=1)
        ours, theirs = (logits.gather(1, one[:, None])[:, 0] for one in (token, second))
        logprob = ours - logits.logsumexp(dim=1)
        columns.append([one.tolist() for one in (best, second, logprob, ours - theirs, ours)])
        if position + 1 < steps:
            logits = prefilled.step(token)
    names = ("best", "second", "logprob", "gap", "logit")
    return {name: [list(row) for row in zip(*(one[n] for one in columns), strict=True)] for n, name in enumerate(names)}


def read_cases(session: Any, spec: Spec, cases: dict[str, Any], reference: dict[str, Case] | None) -> dict[str, Case]:
    begun, read = time.monotonic(), {}
    for name, prompts in cases.items():
        read[name] = read_case(session, prompts, spec.steps, reference and reference[name])
    say(f"{spec.role}: {len(cases)} cases read in {time.monotonic() - begun:.1f} s")
    return read


def cuda_engine(session: Any) -> Any:
    """Return the session's CUDA engine, or None if it uses another engine."""
    from sglang_hybrid.engines.cuda.engine import CudaEngine

    fast = session.runner.attn_backend._fast
    return fast if isinstance(fast, CudaEngine) else None


def rows_counter(session: Any) -> Callable[[], dict[str, int]]:
    """Return a function that counts rows with misses so far, by outcome or by who computed the misses."""
    engine = cuda_engine(session)
    if engine is not None:
        mailbox = engine._mailbox
        return lambda: mailbox.outcomes() if mailbox else {}

    def counted() -> dict[str, int]:
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return {
            sample.labels["by"]: int(sample.value)
            for sample in samples
            if sample.name == "sglang_hybrid_miss_rows_total"
        }

    return counted


def use_variant(session: Any, settings: list[str]) -> None:
    from sglang_hybrid.config import load_config

    config = load_config(None, settings)
    engine = cuda_engine(session)
    if config.worker == "none" and engine is not None:
        # settings alone do not detach the worker of a process that started with one; it cannot be attached again
        engine._mailbox = None
    session.use(config)


def read_variants(
    session: Any,
    spec: Spec,
    cases: dict[str, Any],
    reference: dict[str, Case],
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Record the cases of every variant. ``write`` gets all results after each: the next one may kill the process."""
    results: dict[str, Any] = {}
    for name, settings in spec.variants:
        begun = time.monotonic()
        try:
            use_variant(session, settings)
            say(f"{name}: ready after {time.monotonic() - begun:.1f} s")
            counter = rows_counter(session)
            before = counter()
            results[name] = {"cases": read_cases(session, spec, cases, reference)}
            after = counter()
            rows = {key: value - before.get(key, 0) for key, value in after.items()}
            results[name]["rows"] = {key: value for key, value in rows.items() if value}
            if engine := cuda_engine(session):
                results[name]["refused"] = int(engine.program.refused)
        except Exception as error:  # the next variant may work
            say(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
            if spec.device == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost, which ends this process
        finally:
            write(results)


def attend_to_prompts_as_stored(session: Any) -> None:
    """Make a stock backend's prefill read all tokens from the FP8 KV cache, as hybrid does.

    By default stock's prefill reads prefixes from the cache, but a prompt's new tokens before they are rounded to FP8,
    so answers depend on prefill chunks. Stock's kernels for deterministic inference read all tokens from the cache, and
    the backend's ``enable_deterministic`` selects them. Raises AttributeError if the backend has no such attribute.
    """
    backend = session.runner.attn_backend
    if not hasattr(backend, "enable_deterministic"):
        raise AttributeError(f"{type(backend).__name__} cannot be told to read new tokens from the KV cache")
    backend.enable_deterministic = True


def main() -> None:
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    begun = time.monotonic()
    from sglang_hybrid.integration import activate

    if spec.role != "hybrid" and spec.device == "cuda":
        # stock runs without the plugin; but on a CPU stock needs the plugin's page allocator
        activate.load_plugin = lambda: None
    from sglang_hybrid.integration.model_session import ModelSession

    session = ModelSession(spec.flags)
    if spec.is_fp8 and spec.role != "hybrid":
        attend_to_prompts_as_stored(session)
    say(f"{spec.role}: model loaded after {time.monotonic() - begun:.0f} s")
    cases = json.loads(Path(spec.cases).read_text())
    reference = None if spec.role == "stock" else wait_for(Path(spec.reference), spec.timeout)["stock"]["cases"]

    def write(found: dict[str, Any]) -> None:
        write_whole(Path(spec.out), found | {"layers": session.model_config.num_hidden_layers})

    with Path(spec.turn).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if spec.role == "hybrid":
            assert reference is not None
            read_variants(session, spec, cases, reference, write)
        else:
            write({spec.role: {"cases": read_cases(session, spec, cases, reference)}})
    # all results are written: skip the teardown of model and GPU state, which takes seconds and may fail
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
