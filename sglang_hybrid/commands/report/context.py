"""What experiments are given: the model, the size, the policies that there are, and measurements to ask for."""

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
    """A loaded model that answers, see ``session.client``."""

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
    codebooks: dict[str, Path] = field(default_factory=dict)  # "GROUPSxCENTROIDS" -> file
    progress: Progress = lambda _text, _part: None
    start: StartSession = SessionProcess
    _session: Session | None = None

    def key(self, **parts: Any) -> str:
        """Of a result on this machine with this model."""
        return key_of(model=self.model.name, machine=self.machine, policies=self.policies, **parts)

    # -- sessions ----------------------------------------------------------------------------

    def session(self, settings: Sequence[str] = (), *, variants: Sequence[str] = ()) -> Session:
        """A model whose settings may change. ``variants``: policies that will be asked of it.

        A policy that keeps codes of keys from prefill on has to be named in ``settings``.
        """
        graphs = all(policy_named(name).cuda_program is not None for name in variants)
        return self._started(self._load("any", settings, self.size.text_tokens, 8, cuda_graphs=graphs))

    def served(self, policy: str, settings: Sequence[str]) -> Session:
        """A model with the engine that a server with these settings has; ``stock``: SGLang's own."""
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
        """The process that is there, if it has loaded the same; SGLang's processes do not share a GPU well."""
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

    # -- speed, which several experiments show -----------------------------------------------

    def speed_settings(self, policy: str) -> list[str]:
        """Of the backend, for runs that measure speed."""
        if policy == STOCK:
            return []
        settings = [f"policy={policy}", f"budget_tokens={self.size.speed_budget}", "whole_requests=never"]
        if policy == "hgca":
            settings.append(f"hgca.window_tokens={max(64, self.size.rate_window)}")
        if policy == "scout" and self.has_gpu:
            settings.append("prediction=raw")  # nothing has to be fitted first
        return settings

    def speed_of(self, policy: str) -> dict[str, Any]:
        """All speed measurements of a policy, made once while its model is loaded."""
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
            found["load_average"] = [before, load_average()]  # experiments that show it may run much later
            self.cache.put(name, key, found)
        return found


_SPEED_NUMBERS = ("speed", "batch", "rate", "warm")
_RATE_BINS = 32
RATE_POLICIES = ("full", "scout", "hgca")
