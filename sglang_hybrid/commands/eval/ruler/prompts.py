"""Provides the prompts of a request: from a file, from the user's cache, or from NVIDIA's generators."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.model_tokenizer import ModelTokenizer
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler import package
from sglang_hybrid.commands.eval.ruler.generating import Job, generate
from sglang_hybrid.commands.eval.ruler.prompts_file import FORMAT, Header, read_prompts, write_prompts
from sglang_hybrid.commands.eval.ruler.request import SAMPLES, Request, check_names
from sglang_hybrid.commands.eval.ruler.scoring import PREFIX
from sglang_hybrid.user_cache import default_cache_dir


def cache_key(tokenizer: str, package: str, length: int, tasks: Sequence[str], samples: int, seed: int) -> str:
    """Return the key of a cached file. ``tokenizer``: its fingerprint. ``package``: its name and version."""
    facts = [FORMAT, tokenizer, package, length, list(tasks), samples, seed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def ruler_prompts(
    request: Request, tokenizer: Callable[[], ModelTokenizer], console: Console, *, check_tokenizer: bool = True
) -> tuple[Header, list[RetrievalPrompt]]:
    """Return the prompts of a request, ordered by length and task, and their header.

    ``tokenizer`` is called only if one is needed. ``check_tokenizer``: refuse a file that another tokenizer made.
    Prompts of a file keep the file's order. Raise InputError for a file that cannot be used, and for prompts that
    cannot be made.
    """
    if request.source is not None:
        header, prompts = read_prompts(request.source)
        if check_tokenizer and header.tokenizer != tokenizer().fingerprint:
            raise InputError(f"{request.source} was made with another tokenizer than that of {tokenizer().directory}")
        return header, _chosen(request, prompts)
    return _from_generators(request, tokenizer, console)


def _chosen(request: Request, prompts: Sequence[RetrievalPrompt]) -> list[RetrievalPrompt]:
    """Return the prompts of a file that the request asks for. Raise InputError if the file does not have them."""
    lengths = dict.fromkeys(prompt.length for prompt in prompts)
    for length in request.lengths:
        if length not in lengths:
            known = ", ".join(map(str, lengths))
            raise InputError(f"{request.source} has no prompts of {length} tokens, but of {known}: change --ruler")
    tasks = dict.fromkeys(prompt.task.removeprefix(PREFIX) for prompt in prompts)
    check_names(request, tasks, str(request.source))
    seen: Counter[tuple[str, int]] = Counter()
    chosen = []
    for prompt in prompts:
        of_task = prompt.task.removeprefix(PREFIX) in (request.tasks or tasks)
        if of_task and prompt.length in (request.lengths or lengths):
            seen[prompt.task, prompt.length] += 1
            if request.samples is None or seen[prompt.task, prompt.length] <= request.samples:
                chosen.append(prompt)
    if request.samples is not None and (fewest := min(seen.values())) < request.samples:
        raise InputError(f"{request.source} has {fewest} prompts a task, not {request.samples}: lower --samples")
    return chosen


def _from_generators(
    request: Request, load_tokenizer: Callable[[], ModelTokenizer], console: Console
) -> tuple[Header, list[RetrievalPrompt]]:
    """Return the cached prompts of a request, after making the missing ones and writing them to the cache."""
    found = package.installed()
    known = found.tasks()
    check_names(request, known, f"{package.NAME} {found.version}")
    tokenizer, samples = load_tokenizer(), request.samples or SAMPLES
    names = [name for name in known if name in (request.tasks or known)]
    header = Header(tokenizer.fingerprint, f"{package.NAME} {found.version}", request.seed)
    files = {
        length: _cache_folder()
        / f"{cache_key(header.tokenizer, header.package, length, names, samples, request.seed)}.jsonl.gz"
        for length in request.lengths
    }
    prompts = {length: cached for length, path in files.items() if (cached := _cached(path)) is not None}
    missing = [length for length in files if length not in prompts]
    if missing:
        console.print(f"making {len(names) * len(missing) * samples} prompts of RULER, for {files[missing[0]].parent}")
        jobs = [Job(known[name], length) for length in missing for name in names]
        made = generate(found, tokenizer, jobs, samples, request.seed, console)
        for length in missing:
            prompts[length] = [one for job in jobs if job.length == length for one in made[job]]
            write_prompts(files[length], header, prompts[length])
    return header, [prompt for length in files for prompt in prompts[length]]


def _cache_folder() -> Path:
    return default_cache_dir() / "ruler"


def _cached(path: Path) -> list[RetrievalPrompt] | None:
    """Return the prompts of a cached file, or None if the file is missing or damaged; it is written again then."""
    try:
        return read_prompts(path)[1]
    except InputError:
        return None
