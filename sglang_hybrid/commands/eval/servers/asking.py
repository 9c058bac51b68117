"""Sends all prompts to all servers, several at a time.

Threads send prompts and wait for replies. All replies go through one queue to the caller's thread, which alone keeps
the state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.servers.server import Reply, Server, ServerError


@dataclass
class Outcome:
    """The replies of one server by number of the prompt, and why there are no more; "" if all prompts were answered."""

    replies: dict[int, Reply] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class _Event:
    server: int
    prompt: int | None = None  # None: a thread has ended
    reply: Reply | ServerError | None = None


def ask_all(
    servers: Sequence[Server],
    prompts: Sequence[RetrievalPrompt],
    concurrency: int,
    on_reply: Callable[[RetrievalPrompt], None] = lambda _prompt: None,
) -> list[Outcome]:
    """Send all prompts to each server, ``concurrency`` at a time, and return one outcome for each server.

    A server that fails gets no further prompts; its pending replies are still collected. Ctrl-C ends the sending to all
    servers: the outcomes hold the replies until then. ``on_reply`` is called in the caller's thread.
    """
    outcomes = [Outcome() for _ in servers]
    events: SimpleQueue[_Event] = SimpleQueue()
    senders = [_Senders(number, server, prompts, events) for number, server in enumerate(servers)]
    running = sum(one.start(min(concurrency, len(prompts))) for one in senders)
    try:
        while running:
            event = events.get()
            if event.prompt is None:
                running -= 1
            elif isinstance(event.reply, Reply):
                outcomes[event.server].replies[event.prompt] = event.reply
                on_reply(prompts[event.prompt])
            else:
                senders[event.server].stop()
                outcomes[event.server].error = outcomes[event.server].error or str(event.reply)
    except KeyboardInterrupt:
        for event in _arrived(events):
            if event.prompt is not None and isinstance(event.reply, Reply):
                outcomes[event.server].replies[event.prompt] = event.reply
        for outcome in outcomes:
            outcome.error = outcome.error or "interrupted"
    finally:
        for one in senders:
            one.stop()
    return outcomes


def _arrived(events: SimpleQueue[_Event]) -> Iterator[_Event]:
    """Take the events that are in the queue, and wait for no others."""
    while True:
        try:
            yield events.get_nowait()
        except Empty:
            return


class _Senders:
    """The threads that send prompts to one server."""

    def __init__(
        self, number: int, server: Server, prompts: Sequence[RetrievalPrompt], events: SimpleQueue[_Event]
    ) -> None:
        self._number, self._server, self._prompts, self._events = number, server, prompts, events
        self._stopped = threading.Event()
        self._left: SimpleQueue[int] = SimpleQueue()
        for prompt in range(len(prompts)):
            self._left.put(prompt)

    def start(self, count: int) -> int:
        for _ in range(count):
            # daemon threads: the process does not wait for replies after Ctrl-C
            threading.Thread(target=self._send, daemon=True).start()
        return count

    def stop(self) -> None:
        self._stopped.set()

    def _send(self) -> None:
        try:
            while not self._stopped.is_set():
                number = self._left.get_nowait()
                self._events.put(_Event(self._number, number, self._reply(number)))
        except Empty:
            pass
        finally:
            self._events.put(_Event(self._number))

    def _reply(self, number: int) -> Reply | ServerError:
        try:
            return self._server.answer(self._prompts[number])
        except ServerError as error:
            self.stop()
            return error
