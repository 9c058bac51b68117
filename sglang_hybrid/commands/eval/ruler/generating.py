"""Runs NVIDIA's generators, one process for each task and length, as many at a time as there are cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.model_tokenizer import ChatTemplate, ModelTokenizer
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler import run_generator
from sglang_hybrid.commands.eval.ruler.package import Package, Task
from sglang_hybrid.commands.eval.ruler.scoring import PREFIX
from sglang_hybrid.commands.eval.tokenizer import beginning, tokens
from sglang_hybrid.progress import Steps, steps

# Marks for the chat template, which is inserted afterwards: scripts change words of the template that they get, and
# would change words of a system prompt too. The second mark is a word of its own, because a script drops the last word
# before the answer's prefix.
_BEFORE, _AFTER = "\ue000", " \ue001"
_SPARE = 16  # tokens in reserve: at its borders text is split into other tokens than alone
_LOOK_EVERY = 0.1  # seconds between two checks of the processes
# A script whose task does not fit the length never ends: it computes for so many seconds and prints nothing new, or it
# prints far too much. Seconds that it waits for a core do not count: a busy machine would end scripts that work.
_SILENT = 120.0
_MOST_SAID = 16 << 20  # bytes
# These scripts make an easier task if the length is below 4096. So space is reserved by a longer answer, and not by a
# shorter prompt.
_BY_LENGTH = ("niah", "common_words_extraction")
_WITHOUT_ANSWER = ("freq_words_extraction",)  # this script does not subtract the answer's tokens from the length
_DONE = re.compile(rb"(\d+)/\d+ \[")  # tqdm


class Made(msgspec.Struct, frozen=True):
    """One line of a script's output file. Further fields are ignored."""

    input: str
    outputs: list[str]


@dataclass(frozen=True)
class Job:
    task: Task
    length: int


def generate(
    package: Package, tokenizer: ModelTokenizer, jobs: Sequence[Job], samples: int, seed: int, console: Console
) -> dict[Job, list[RetrievalPrompt]]:
    """Make ``samples`` prompts for each job. Raise InputError if a script fails."""
    prompts: dict[Job, list[RetrievalPrompt]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sglang-hybrid-ruler-") as folder,
        steps(console, sum(job.length * samples for job in jobs)) as bar,
    ):
        waiting = [
            _Generator(package, tokenizer, job, samples, seed, Path(folder) / str(number))
            for number, job in enumerate(jobs)
        ]
        for done in _run(waiting, bar):
            prompts[done.job] = done.prompts()
    return {job: prompts[job] for job in jobs}


def _run(waiting: list[_Generator], bar: Steps) -> Iterator[_Generator]:
    """Run all generators, one per core at a time, the longest jobs first. Yield each generator when it is done."""
    waiting.sort(key=lambda one: -one.job.length)
    cores, running, told = len(os.sched_getaffinity(0)), list[_Generator](), ""
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                running.append(waiting.pop(0))
                running[-1].start()
            if (said := ", ".join(one.job.task.name for one in running[:3])) != told:
                bar.say(f"RULER: {said}")
                told = said
            time.sleep(_LOOK_EVERY)
            for one in list(running):
                ended = one.has_ended()
                bar.advance(one.new_samples() * one.job.length)
                if ended:
                    running.remove(one)
                    yield one
    finally:
        for one in running:
            one.end()


class _Generator:
    """One process that runs one of NVIDIA's generators."""

    def __init__(
        self, package: Package, tokenizer: ModelTokenizer, job: Job, samples: int, seed: int, folder: Path
    ) -> None:
        self.job, self._tokenizer, self._samples, self._folder = job, tokenizer, samples, folder
        self._chat = tokenizer.chat
        prompt_tokens, answer_tokens = _lengths(job, self._chat_tokens())
        self._command = [
            sys.executable, "-u", run_generator.__file__, str(package.script(job.task)), "--save_dir", str(folder),
            "--save_name", "made", "--subset", "prompts", "--tokenizer_type", "hf",
            "--tokenizer_path", str(tokenizer.directory), "--max_seq_length", str(prompt_tokens),
            "--tokens_to_generate", str(answer_tokens), "--num_samples", str(samples), "--random_seed", str(seed),
            *job.task.arguments, "--template", self._template(),
        ]  # fmt: skip
        # The scripts import their package, which this Python may have found on a path that a new process does not have.
        path = [str(package.root.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._counted = 0

    def _chat_tokens(self) -> int:
        if self._chat is None:
            return len(beginning(self._tokenizer))
        return len(tokens(self._tokenizer, self._chat.before)) + len(tokens(self._tokenizer, self._chat.after))

    def _template(self) -> str:
        task = self.job.task
        if self._chat is None:
            return task.template + task.answer_prefix
        return _BEFORE + task.template + _AFTER + task.answer_prefix

    def start(self) -> None:
        self._folder.mkdir()
        self._log = self._folder / "log"
        self._said, self._said_at = b"", 0.0  # seconds that the process had computed when it printed this
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def has_ended(self) -> bool:
        """Return True if the process has ended successfully. Raise InputError if it failed or hangs."""
        status, now = self._process.poll(), self._computed()
        if (said := self._last_words()) != self._said:
            self._said, self._said_at = said, now
        where = f"RULER's task {self.job.task.name} of {self.job.length} tokens"
        if status is None and (now - self._said_at > _SILENT or self._log.stat().st_size > _MOST_SAID):
            raise InputError(f"{where} does not fit this length with this tokenizer: raise the length, or leave it out")
        if status:
            why = said.decode(errors="replace") or "nothing was said"
            raise InputError(f"{where} cannot be made, its generator ended with status {status}: {why}")
        return status is not None

    def _computed(self) -> float:
        """Return the seconds for which a core has worked for the process; 0 if the process is gone."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def new_samples(self) -> int:
        """Return the number of samples that were made since the last call."""
        counted = _DONE.search(self._said)
        done = self._samples if self._process.returncode == 0 else int(counted[1]) if counted else 0
        new, self._counted = max(0, done - self._counted), max(self._counted, done)
        return new

    def _last_words(self) -> bytes:
        """Return the last line of the log that is not empty. Carriage returns of a progress bar count as line ends."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 1000))
            lines = [line.strip() for line in log.read().replace(b"\r", b"\n").split(b"\n")]
        return next((line for line in reversed(lines) if line), b"")[:300]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def prompts(self) -> list[RetrievalPrompt]:
        decoder, task = msgspec.json.Decoder(Made), self.job.task
        lines = (self._folder / "made" / "prompts.jsonl").read_bytes().splitlines()
        return [
            RetrievalPrompt(
                PREFIX + task.name, with_chat(self._tokenizer, self._chat, made.input), tuple(made.outputs),
                self.job.length, None, task.new_tokens, task.metric,
            )
            for made in map(decoder.decode, lines)
        ]  # fmt: skip


def _lengths(job: Job, chat_tokens: int) -> tuple[int, int]:
    """Return the script's arguments --max_seq_length (prompt and answer) and --tokens_to_generate (answer).

    They leave space for the tokens that the script does not count: the chat template, and for some scripts the answer.
    """
    unknown, answer = chat_tokens + _SPARE, job.task.new_tokens
    if job.task.generator in _BY_LENGTH:
        return job.length, answer + unknown
    if job.task.generator in _WITHOUT_ANSWER:
        unknown += answer
    return job.length - unknown, answer


def with_chat(tokenizer: ModelTokenizer, chat: ChatTemplate | None, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that a script made, with the chat template in the place of its marks.

    A script that puts an example in front of its question uses the template for both. So the example has marks too, and
    is a part of the user's words.
    """
    if chat is None:
        return beginning(tokenizer) + tokens(tokenizer, text)
    asked, _, prefix = text.rpartition(_AFTER)
    return tokens(tokenizer, chat.before + asked.replace(_BEFORE, "").replace(_AFTER, "") + chat.after + prefix)
