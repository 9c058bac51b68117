"""The lines that a launcher prints: few until the URL, then the progress of prompts and the speed of requests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.text import Text

from sglang_hybrid import events
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.registry import policy_named

GIB = 1 << 30
MOST_LINES = 5  # of an error message
_LINE_SECONDS = 10.0  # between two lines about running requests, if the output is not a terminal
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Refusal)\b.*")


class Console:
    """Writes to standard output. Errors of a closed terminal are ignored, because the server has to go on."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self.is_terminal = self._rich.is_terminal
        self._has_status = False

    def say(self, line: str = "", style: str | None = None) -> None:
        self.status("")
        with contextlib.suppress(OSError):
            self._rich.print(Text(line), style=style)
            sys.stdout.flush()

    def say_goodbye(self, line: str) -> None:
        """Print the last line, in place of the ^C that a terminal shows."""
        self._has_status = True
        self.say(line)

    def write(self, text: str) -> None:
        """Print the text of another program unchanged."""
        self.status("")
        with contextlib.suppress(OSError):
            sys.stdout.write(text)
            sys.stdout.flush()

    def frame(self, text: str) -> None:
        self.status("")
        with contextlib.suppress(OSError):
            # never narrower than its text: a URL that is broken in two cannot be copied
            width = max(self._rich.width, len(text) + 4)
            self._rich.print(Panel.fit(Text(text, style="bold green")), width=width, crop=False)
            sys.stdout.flush()

    def status(self, text: str) -> None:
        """Replace the status line at the end of the output; "" removes it. Do nothing if output is not a terminal."""
        if not self.is_terminal or not (text or self._has_status):
            return
        with contextlib.suppress(OSError):
            sys.stdout.write(f"\r\x1b[2K{text[: self._rich.width - 1]}")
            sys.stdout.flush()
        self._has_status = bool(text)


class Progress:
    """Shows the running work in one line: updated in place on a terminal, printed every 10 seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._prefill: events.Prefill | None = None
        self._printed: float | None = None  # time of the last line, or of the start of the work; None: nothing runs

    def show(self, event: events.AnyEvent) -> None:
        now = time.monotonic()
        match event:
            case events.Prefill():
                self._prefill = event
                self._tell(prefill_line(event, 0.0), now)
            case events.Layer() if self._prefill:
                self._tell(prefill_line(self._prefill, event.done / event.total), now)
            case events.Decode():
                self._prefill = None
                self._tell(decode_line(event), now)
            case events.Idle():
                self._prefill = None
                self._printed = None
                self._console.status("")

    def _tell(self, line: str, now: float) -> None:
        if self._console.is_terminal:
            self._console.status(line)
        elif self._printed is None:
            self._printed = now
        elif now - self._printed >= _LINE_SECONDS:
            self._printed = now
            self._console.say(line)


def prefill_line(event: events.Prefill, part_of_chunk: float) -> str:
    percent = 100 * (event.done + event.chunk * part_of_chunk) / max(1, event.total)
    return f"prompt: {percent:3.0f} % of {event.total:,} tokens{_waiting(event.waiting)}"


def decode_line(event: events.Decode) -> str:
    rate = event.tokens / max(event.seconds, 1e-6)
    return f"{event.running} running{_waiting(event.waiting)}, {rate:.1f} tokens/s"


def _waiting(count: int) -> str:
    return f", {count} waiting" if count else ""


class Facts:
    """Collects the events of a starting server, and describes the server in a few lines."""

    def __init__(self, config: HybridConfig | None) -> None:
        self._config = config
        self._told: dict[type[events.AnyEvent], events.AnyEvent] = {}

    def take(self, event: events.AnyEvent) -> None:
        """Store ``event``, unless another rank has sent one of the same type before."""
        self._told.setdefault(type(event), event)

    def lines(self) -> list[str]:
        return [line for line in (self._model(), self._memory(), self._policy(), self._worker()) if line]

    def _model(self) -> str | None:
        match self._told.get(events.Model):
            case events.Model(layers=layers, dtype=dtype, device=device, context_tokens=context):
                return f"  model    {layers} layers in {dtype} on {device}, context up to {context:,} tokens"
        return None

    def _memory(self) -> str | None:
        match self._told.get(events.Pool):
            case events.Pool(tokens=tokens, host_bytes=host, device_bytes=device):
                on_device = f", {device / GIB:.2f} GiB of GPU memory for model and digests" if device else ""
                return f"  memory   {host / GIB:.2f} GiB of host memory for {tokens:,} tokens of KV cache{on_device}"
        return None

    def _policy(self) -> str | None:
        if self._config is None:
            return None
        policy = policy_named(self._config.policy)
        if not policy.needs.prediction:
            return f"  policy   {policy.name}: {policy.description}"
        profile = f", profile {os.path.basename(file)}" if (file := self._config.profile_file) else ""
        return f"  policy   {policy.name}: a budget of {self._config.budget_tokens:,} tokens a request{profile}"

    def _worker(self) -> str | None:
        if self._config is None:
            return None
        match self._told.get(events.Worker):
            case events.Worker(pid=pid, provider=provider, variant=variant, threads=threads):
                many = "1 thread" if threads == 1 else f"{threads} threads"
                return f"  worker   process {pid}: {provider} kernels ({variant}), {many}"
        return "  worker   none: the server's own process computes everything"


def announce(console: Console, url: str, model: str) -> None:
    """Print the server's URL, and a curl command that tries the server."""
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 8})
    short = model.rstrip("/").rsplit("/", 1)[-1]  # a path would push the URL out of its line
    console.frame(f"sglang-hybrid is serving {short} at {url}")
    console.say(f"OpenAI-compatible: {url}/v1. Ctrl-C ends it. Try it:")
    console.say(f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")


def complain(sentence: str) -> None:
    """Print an error message to standard error, in at most five lines."""
    lines = [line for line in sentence.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"... and {len(lines) - MOST_LINES + 1} more"]
    print(f"sglang-hybrid: {chr(10).join(lines)}", file=sys.stderr, flush=True)


def last_words(log: Sequence[str]) -> str:
    """Return the last exception in ``log``, or else its last three lines."""
    for line in reversed(log):
        # a traceback ends with the exception's own line, which SGLang's log puts in front or not
        if match := _EXCEPTION.match(line.strip()):
            return match[0]
    return "\n".join(line for line in log[-3:])
