"""Workloads of a benchmark: lengths of prompts and answers, and the rates at which requests arrive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.arguments import tokens_of
from bench.serving.benchmark import Asked
from bench.serving.conversations import MEAN_OUTPUT, write_conversations

MIX = "mix"


@dataclass(frozen=True)
class Workload:
    """Lengths and rates of requests. Written ``32k:500@0.5,1``: tokens in, tokens out, requests a second.

    ``mix@4,8`` means conversations with lengths like ShareGPT's; ``mix:16@2`` makes their prompts 16 times longer.
    """

    name: str
    rates: tuple[float, ...]
    input_tokens: int = 0  # 0: conversations
    output_tokens: int = MEAN_OUTPUT
    scale: float = 1.0  # factor of the lengths of conversations' prompts

    @classmethod
    def of(cls, text: str) -> Workload:
        try:
            what, rates = text.split("@")
            numbers = tuple(sorted(float(rate) for rate in rates.split(",")))
            first, _, second = what.partition(":")
            if first == MIX:
                return cls(what, numbers, scale=float(second or 1))
            return cls(what, numbers, tokens_of(first), tokens_of(second))
        except ValueError as error:
            raise ValueError(f"{text!r}: write 32k:500@0.5,1 or mix@4,8 (tokens in, out, requests a second)") from error

    def asked(
        self, rate: float, prompts: int, concurrency: int, tokenizer: Path, folder: Path, sharegpt: Path | None = None
    ) -> Asked:
        """Return the requests for SGLang's benchmark. ``sharegpt``: the data set; None: generate one."""
        if self.input_tokens:
            return Asked(prompts, self.input_tokens, self.output_tokens, concurrency, rate)
        file = sharegpt or write_conversations(folder / "conversations.json", tokenizer, 2 * prompts, self.scale)
        return Asked(prompts, 0, 0, concurrency, rate, file)
