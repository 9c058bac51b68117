"""One phase of a chaos run: a server, its undisturbed answers, then clients and faults at the same time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import requests

from bench.chaos.asking import Answer, Token, ask
from bench.chaos.comparing import is_explained, wrong_but_for_ties, wrong_tokens
from bench.chaos.faults import Fault, all_faults, without_worker, worker_faults
from bench.chaos.target import Target, TargetError
from bench.chaos.workload import Request

CLIENTS = 6
_ABORTED_SHARE = 0.2
_MEAN_SECONDS = 1.5  # between the starts of two faults
_AT_A_TIME = 3  # most faults that run at once
# never at the same time: SGLang ends when it cannot open the weights that it was told to load
_APART = {"no descriptors left", "weights updated"}
_TELL_SECONDS = 10.0
_TRIES = 5
_OTHERS = 8  # best tokens requested with each token, to recognize a tie
_SETTLE_SECONDS = 60.0
_SHOWN = 5  # tokens of a difference that are printed

Tell = Callable[[str], None]


@dataclass
class Findings:
    """Counts and examples of what a phase found, or the sum of all phases."""

    faults: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    tokens: int = 0
    aborted: int = 0
    retracted: int = 0
    left_at_ties: int = 0  # only where numbers differ from batch to batch
    retracted_with_other_text: int = 0  # each was explained, or counts among wrong_tokens
    wrong_tokens: int = 0
    lost: int = 0  # requests without an answer and without an error
    failed: int = 0  # requests with an error that no abort explains
    leaked: Counter[str] = field(default_factory=Counter)
    longest_pause: float = 0.0  # between two tokens of a request that was not retracted
    rows_by: Counter[str] = field(default_factory=Counter)  # rows whose misses were served, by who served them
    examples: list[str] = field(default_factory=list)  # descriptions of what is wrong

    @property
    def is_clean(self) -> bool:
        return not (self.wrong_tokens or self.lost or self.failed or self.leaked.total())

    def add(self, other: Findings) -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, list):
                getattr(self, name).extend(value)
            elif name == "longest_pause":
                self.longest_pause = max(self.longest_pause, value)
            else:
                setattr(self, name, getattr(self, name) + value)


class Phase:
    def __init__(
        self,
        target: Target,
        asked: Sequence[Request],
        seed: int,
        tell: Tell,
        stops_at_first: bool = False,
        differs_without_worker: bool = False,
    ) -> None:
        """``stops_at_first``: end the phase once something is found to be wrong.

        ``differs_without_worker``: the server computes misses with another query than the worker, so the answers that
        are given without a worker are right, too.
        """
        self._differs_without_worker = differs_without_worker
        self._stops_at_first = stops_at_first
        self._target = target
        self._asked = asked
        self._seed = seed
        self._tell = tell
        self._expected: dict[int, list[Answer]] = {}  # undisturbed; several where each is right
        self._suspects: list[tuple[Request, Answer]] = []  # retracted, and with other tokens
        self._lock = threading.RLock()
        self._end = threading.Event()
        self.findings = Findings()

    def run(self, seconds: float) -> Findings:
        self._answer_undisturbed()
        if self._stops_at_first and not self.findings.is_clean:
            return self.findings
        held = self._settled_holdings()
        threads = [threading.Thread(target=self._client, args=(n,), name=f"client-{n}") for n in range(CLIENTS)]
        threads.append(threading.Thread(target=self._torment, name="faults"))
        for thread in threads:
            thread.start()
        ends = time.monotonic() + seconds
        try:
            while time.monotonic() < ends and self._target.is_alive and not self._end.wait(_TELL_SECONDS):
                self._tell(self._so_far())
                if self._stops_at_first and not self.findings.is_clean:
                    return self.findings
        finally:
            self._end.set()
            for thread in threads:
                thread.join()
        if not self._target.is_alive:
            self._note(f"the server ended:\n{self._target.log_tail(40)}", failed=1)
            return self.findings
        self._explain_suspects()
        self._look_for_leaks(held)
        self.findings.rows_by.update(self._target.miss_rows())
        return self.findings

    def _answer_undisturbed(self) -> None:
        """Get the undisturbed answer of each request, sent alone with an empty cache; then check all sent together."""
        self._target.wait_for_worker()
        for request in self._asked:
            answer = self._ask_alone(request)
            self._expected[request.number] = [answer]
            if self._target.has_same_bits and any(ids != answer.ids[0] for ids in answer.ids):
                self._note(f"request {request.number}: its continuations differ among themselves", wrong_tokens=1)
            self._tell(f"undisturbed answers: {len(self._expected)} of {len(self._asked)}")
        if self._differs_without_worker:
            with without_worker(self._target):
                for request in self._asked:
                    self._expected[request.number].append(self._ask_alone(request))
            self._tell("undisturbed answers without a worker are there, too")
        # together, too: SGLang's thread pools grow until they have a thread for each concurrent request
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda request: ask(self._target.url, request), self._asked))
        for request, answer in zip(self._asked, answers, strict=True):
            self._judge(request, answer, was_aborted=False)

    def _ask_alone(self, request: Request) -> Answer:
        """Return the answer of ``request``, sent alone with an empty cache until it is not retracted."""
        for _ in range(_TRIES):
            self._target.wait_until_idle()
            self._target.flush()
            answer = ask(self._target.url, request, others=0 if self._target.has_same_bits else _OTHERS)
            if answer.error or answer.lost or not all(answer.continuations):
                raise TargetError(f"request {request.number} has no undisturbed answer: {answer.error or answer}")
            if not answer.retractions:
                return answer
        raise TargetError(f"request {request.number} was retracted {_TRIES} times though it was alone")

    # -- clients -----------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self._seed}-client-{number}")
        turn = 0
        while not self._end.is_set():
            request = chance.choice(self._asked)
            turn += 1
            rid, drop_after = f"chaos-{number}-{turn}", None
            aborter = None
            if chance.random() < _ABORTED_SHARE:
                if chance.random() < 0.5:
                    drop_after = chance.randrange(request.new_tokens)
                else:
                    aborter = threading.Timer(chance.random() * 3, self._abort, (rid,))
                    aborter.start()
            answer = ask(self._target.url, request, drop_after, rid)
            if aborter:
                aborter.join()
            if self._target.is_alive:
                self._judge(request, answer, was_aborted=bool(aborter) or drop_after is not None)

    def _abort(self, rid: str) -> None:
        try:
            requests.post(f"{self._target.url}/abort_request", json={"rid": rid}, timeout=60)
        except requests.RequestException as error:
            self._note(f"abort of {rid}: {error}", failed=1)

    def _judge(self, request: Request, answer: Answer, was_aborted: bool) -> None:
        undisturbed = self._expected[request.number]
        about = f"{len(request.ids)} tokens, n={request.answers}"
        about += ", aborted" * answer.aborted + ", retracted" * bool(answer.retractions)
        name = f"request {request.number} ({about})"
        with self._lock:
            found = self.findings
            if answer.lost:
                self._note(f"{name}: neither answer nor error", lost=1)
                return
            if answer.error:
                if not was_aborted:
                    self._note(f"{name}: {answer.error}", failed=1)
                return
            if answer.aborted and not was_aborted:
                self._note(f"{name}: aborted by nobody", failed=1)
                return
            found.answers += 1
            found.aborted += answer.aborted
            found.tokens += sum(map(len, answer.continuations))
            found.retracted += bool(answer.retractions)
            exact = self._target.has_same_bits
            if not exact:
                wrong, ties = wrong_but_for_ties(undisturbed, answer)
                found.left_at_ties += ties
            else:
                wrong = wrong_tokens(undisturbed[0], answer, exact=not answer.retractions)
            if not answer.retractions:
                found.longest_pause = max(found.longest_pause, answer.longest_pause)
                if wrong:
                    self._note(f"{name}: {_difference(undisturbed[0], answer, exact)}", wrong_tokens=wrong)
            elif wrong:
                found.retracted_with_other_text += 1
                self._suspects.append((request, answer))

    # -- faults ------------------------------------------------------------------------------

    def _torment(self) -> None:
        chance = random.Random(f"{self._seed}-faults")
        table = (
            all_faults(self._target) if self._target.has_same_bits or not self._target.has_worker else worker_faults()
        )
        names, weights = list(table), [weight for weight, _ in table.values()]
        running: list[threading.Thread] = []
        while not self._end.wait(chance.expovariate(1 / _MEAN_SECONDS)):
            running = [thread for thread in running if thread.is_alive()]
            busy = {thread.name for thread in running}
            name = chance.choices(names, weights)[0]
            too_much = name in busy or (name in _APART and busy & _APART)
            if len(running) < _AT_A_TIME and not too_much:
                own = random.Random(chance.random())
                running.append(threading.Thread(target=self._one_fault, args=(name, table[name][1], own), name=name))
                running[-1].start()
        for thread in running:
            thread.join()

    def _one_fault(self, name: str, fault: Fault, chance: random.Random) -> None:
        try:
            done = fault(self._target, chance)
        except (psutil.Error, OSError, TargetError):  # the victim is already gone: requests' errors are OSErrors, too
            return
        if done is not None:
            with self._lock:
                self.findings.faults[name] += 1

    # -- afterwards --------------------------------------------------------------------------

    def _explain_suspects(self) -> None:
        self._target.wait_until_idle()

        for number, (request, answer) in enumerate(self._suspects, start=1):
            self._tell(f"retracted answers with another text: {number} of {len(self._suspects)} asked again")
            undisturbed, exact = self._expected[request.number], self._target.has_same_bits
            if not any(is_explained(request, one, answer, self._ask_alone, exact) for one in undisturbed):
                wrong = wrong_tokens(undisturbed[0], answer, exact=False)
                difference = _difference(undisturbed[0], answer, exact=False)
                self._note(
                    f"request {request.number}, retracted: no resumption gives its text; {difference}",
                    wrong_tokens=wrong,
                )

    def _look_for_leaks(self, before: dict[str, int]) -> None:
        after = self._settled_holdings(like=before)
        for name, count in after.items():
            if count > before[name]:
                more = f":\n{self._target.stacks()}" if name == "threads" else ""
                self._note(f"leaked: {name} {before[name]} -> {count}{more}")
                self.findings.leaked[name] += count - before[name]
        if used := self._target.load()["num_used_tokens"]:
            self._note(f"leaked: {used} tokens of the pool")
            self.findings.leaked["tokens"] += used

    def _settled_holdings(self, like: dict[str, int] | None = None) -> dict[str, int]:
        """Return what the server holds when nothing runs and a worker serves.

        With ``like``, wait up to _SETTLE_SECONDS until no number is above ``like``: some things are freed late.
        """
        self._target.wait_until_idle()
        self._target.wait_for_worker(_SETTLE_SECONDS)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            # a step first: a GPU keeps the mailbox of the last worker until the next step
            ask(self._target.url, self._asked[-1])
            self._target.wait_until_idle()
            self._target.wait_for(self._target.flush, "to flush its cache")
            held = self._target.holdings()
            if not like or time.monotonic() > deadline or all(held[name] <= like[name] for name in held):
                return held

    def _note(self, text: str, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.findings, name, getattr(self.findings, name) + count)
            self.findings.examples.append(text)
        self._tell(f"! {text}")

    def _so_far(self) -> str:
        found = self.findings
        return (
            f"{found.faults.total()} faults, {found.answers} answers ({found.aborted} aborted, {found.retracted} "
            f"retracted), {found.wrong_tokens} wrong tokens, longest pause {found.longest_pause:.1f} s"
        )


def _difference(expected: Answer, given: Answer, exact: bool = True) -> str:
    for right, tokens in zip(expected.continuations, given.continuations, strict=False):
        for place, (a, b) in enumerate(zip(right, tokens, strict=False)):
            if (a.id, a.logprob) != (b.id, b.logprob) if exact else a.id != b.id:
                what = "another token" if a.id != b.id else f"a logprob that is {abs(a.logprob - b.logprob):.1e} off"
                return f"{what} at place {place} of {len(right)}: {_said(right, place)} became {_said(tokens, place)}"
    return "another length"


def _said(tokens: list[Token], place: int) -> str:
    """Return tokens from ``place`` on with logprobs: whether later tokens are right again shows what went wrong."""
    return ", ".join(f"{token.id} ({token.logprob:.3f})" for token in tokens[place : place + _SHOWN])
