"""Makes all prompts that a command line asks for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from sglang_hybrid.commands.eval import lines, longbench, multi_needle, needle, text
from sglang_hybrid.commands.eval.haystack import Haystack
from sglang_hybrid.commands.eval.model_tokenizer import ModelTokenizer
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt, TextPrompt
from sglang_hybrid.commands.eval.ruler.prompts import ruler_prompts
from sglang_hybrid.commands.eval.ruler.prompts_file import write_prompts
from sglang_hybrid.commands.eval.ruler.request import request_of
from sglang_hybrid.commands.eval.tokenizer import Tokenizer
from sglang_hybrid.integration.session_flags import model_directory


def own_prompts(options: argparse.Namespace, tokenizer: Callable[[], Tokenizer]) -> list[RetrievalPrompt | TextPrompt]:
    """Return the prompts of all tasks but RULER's. Call ``tokenizer`` only if a task needs one.

    Raise InputError for texts, files and lengths that cannot be used.
    """
    asked, repeats, seed = options.tasks, options.repeats, options.seed
    prompts: list[RetrievalPrompt | TextPrompt] = []
    if asked:
        read = text.read_text(options.text)
        haystack = Haystack(tokenizer(), read)
    if "text" in asked:
        ids = tokenizer().encode(read, add_special_tokens=False)
        prompts += text.windows(ids, options.windows, options.prompt_tokens, options.decode_tokens)
    if "needle" in asked:
        prompts += needle.needle_prompts(haystack, options.lengths, options.depths, repeats, seed)
    if "multi-needle" in asked:
        prompts += multi_needle.multi_needle_prompts(haystack, options.lengths, repeats=repeats, seed=seed)
    if "lines" in asked:
        prompts += lines.lines_prompts(haystack, options.lengths, repeats * len(options.depths), seed)
    for file in options.longbench:
        prompts += longbench.longbench_prompts(tokenizer(), longbench.read_records(file), max(options.lengths))
    return prompts


def prompts_of_ruler(
    options: argparse.Namespace, tokenizer: Callable[[], ModelTokenizer], console: Console, *, check_tokenizer: bool
) -> list[RetrievalPrompt]:
    """Return RULER's prompts; an empty list if the command line does not ask for RULER.

    ``check_tokenizer``: refuse a file of prompts that another tokenizer made. Raise InputError for flags, files and
    packages that cannot be used.
    """
    request = request_of(options)
    if request is None:
        return []
    return ruler_prompts(request, tokenizer, console, check_tokenizer=check_tokenizer)[1]


def write_ruler_prompts(options: argparse.Namespace) -> int:
    """Write RULER's prompts to the file of ``--ruler-make``. Return exit status 0. Raise InputError on failure."""
    request = request_of(options)
    assert request is not None  # request_of refuses --ruler-make without lengths
    header, prompts = ruler_prompts(request, lambda: ModelTokenizer(model_directory(options)), Console(stderr=True))
    print(f"{write_prompts(options.ruler_make, header, prompts)}: {len(prompts)} prompts")
    return 0
