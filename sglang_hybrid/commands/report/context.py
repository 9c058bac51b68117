"""Context of experiments: the model, the size, the registered policies, and sessions that make measurements."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sglang_hybrid.commands.report.cache import Cache, key_of
from sglang_hybrid.commands.report.machine import load_average
from sglang_hybrid.commands.report.model import Model
from sglang_hybrid.commands.report.session.client import Progress, SessionProcess
from sglang_hybrid.commands.report.session.load import Load
from sglang_hybrid.commands.report.sizes import Size
from sglang_hybrid.policies.registry import policy_named

STOCK = "stock"


class Session(Protocol):
    """A loaded model that makes measurements on request; ``session.client.SessionProcess`` implements this protocol."""

    load: Load

    @property
    def is_alive(self) -> bool: ...

    def ask(self, operation: str, progress: Progress, **arguments: Any) -> Any: ...

    def close(self) -> None: ...


StartSession = Callable[[Load, Path, Progress], Session]


@dataclass
class Context:
    model: Model
    size: Size
    policies: tuple[str, ...]  # registered names
    has_gpu: bool
    machine: dict[str, Any]
    out: Path
    cache: Cache
    device: str | None = None
    codebooks: dict[str, Path] = field(default_factory=dict)  # "GROUPS x CENTROIDS" -> file
    progress: Progress = lambda _text, _part: None
    start: StartSession = SessionProcess
    _session: Session | None = None

    def key(self, **parts: Any) -> str:
        """Return the cache key of a result that depends on this model, this machine, the policies and ``parts``."""
        return key_of(model=self.model.name, machine=self.machine, policies=self.policies, **parts)

    # -- sessions ----------------------------------------------------------------------------

    def session(self, settings: Sequence[str] = (), *, variants: Sequence[str] = ()) -> Session:
        """Return a session whose settings may change between measurements.

        ``variants`` names the policies to be measured; CUDA graphs are used if all of them have a CUDA program.
        A policy that keeps codes of keys from prefill on must be named in ``settings``.
        """
        graphs = all(policy_named(name).cuda_program is not None for name in variants)
        return self._started(self._load("any", settings, self.size.text_tokens, 8, cuda_graphs=graphs))

    def served(self, policy: str, settings: Sequence[str]) -> Session:
        """Return a session with the engine of a server with these settings. ``stock`` is SGLang's own attention."""
        rows, tokens = max(self.size.speed_rows, *self.size.batches), self.size.speed_tokens
        if policy == STOCK:
            return self._started(self._load("stock", (), tokens, rows))
        graphs = policy_named(policy).cuda_program is not None
        return self._started(self._load("served", settings, tokens, rows, cuda_graphs=graphs))

    def _load(
        self, engine: Literal["any", "served", "stock"], settings: Sequence[str], tokens: int, rows: int,
        *, cuda_graphs: bool = True,
    ) -> Load:  # fmt: skip
        return Load(
            str(self.model.path),
            tuple(settings),
            engine,
            tokens,
            rows,
            self.device,
            self.model.has_tokenizer,
            cuda_graphs,
        )

    def _started(self, load: Load) -> Session:
        """Return the running session if it has loaded ``load``, else replace it: SGLang processes share a GPU badly."""
        if self._session is not None and (self._session.load != load or not self._session.is_alive):
            self.close()
        if self._session is None:
            self._session = self.start(load, self.out / "log" / "sessions.log", self.progress)
        return self._session

    def ask(self, session: Session, operation: str, **arguments: Any) -> Any:
        return session.ask(operation, self.progress, **arguments)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    # -- speed measurements, shared by several experiments -----------------------------------

    def speed_settings(self, policy: str) -> list[str]:
        """Return the backend settings for speed measurements of ``policy``; empty for stock SGLang."""
        if policy == STOCK:
            return []
        settings = [f"policy={policy}", f"budget_tokens={self.size.speed_budget}", "whole_requests=never"]
        if policy == "hgca":
            settings.append(f"hgca.window_tokens={max(64, self.size.rate_window)}")
        if policy == "scout" and self.has_gpu:
            settings.append("prediction=raw")  # raw prediction needs no fit
        return settings

    def speed_of(self, policy: str) -> dict[str, Any]:
        """Return all speed measurements of a policy, from the cache or made in one session."""
        size, settings = self.size, self.speed_settings(policy)
        numbers = {name: value for name, value in dataclasses.asdict(size).items() if name.startswith(_SPEED_NUMBERS)}
        key, name = self.key(settings=settings, numbers=numbers), f"speed-{re.sub(r'[^a-z0-9-]', '-', policy)}"
        found = self.cache.get(name, key)
        if found is None:
            before = load_average()
            session = self.served(policy, settings)
            points = [(length, size.speed_rows) for length in size.speed_lengths]
            points += [(size.batch_length, rows) for rows in size.batches]
            steps = {"steps": size.speed_steps, "warm_steps": size.warm_steps}
            found = {"policy": policy, "settings": settings}
            found |= self.ask(session, "speed", points=list(dict.fromkeys(points)), **steps)
            found["breakdown"] = self.ask(
                session,
                "breakdown",
                length=size.batch_length,
                rows=sorted(size.batches)[len(size.batches) // 2],
                **steps,
            )
            if policy in RATE_POLICIES:
                found["rate"] = self.ask(
                    session, "rate", prompt_tokens=size.rate_prompt, steps=size.rate_steps, bins=_RATE_BINS
                )
            found["load_average"] = [before, load_average()]  # of this moment: experiments may show it much later
            self.cache.put(name, key, found)
        return found


_SPEED_NUMBERS = ("speed", "batch", "rate", "warm")
_RATE_BINS = 32
RATE_POLICIES = ("full", "scout", "hgca")
