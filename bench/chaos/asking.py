"""Asking a server over HTTP, and what came back."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from math import nan
from typing import Any

import requests

from bench.chaos.workload import Request

ANSWER_SECONDS = 300.0  # a request that takes longer is lost


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float
    others: tuple[tuple[int, float], ...] = ()  # the best tokens of this place with their logprobs, if asked for


@dataclass
class Answer:
    """Of one request: the tokens of each of its continuations."""

    continuations: list[list[Token]] = field(default_factory=list)
    retractions: int = 0
    longest_pause: float = 0.0  # between two tokens
    aborted: bool = False  # by us, and the server said so or we did not wait
    error: str = ""  # what the server said instead of an answer
    lost: bool = False  # nothing was said within ANSWER_SECONDS

    @property
    def ids(self) -> list[list[int]]:
        return [[token.id for token in tokens] for tokens in self.continuations]


def ask(
    url: str, request: Request, drop_after: int | None = None, rid: str = "", logprobs: bool = True, others: int = 0
) -> Answer:
    """``drop_after``: so many tokens, then the connection is closed. ``rid``: a name by which it can be aborted.

    Without ``logprobs`` all of them are 0. ``others``: how many of the best tokens are told beside each.
    """
    streamed = request.answers == 1
    body: dict[str, Any] = {
        "input_ids": list(request.ids),
        "sampling_params": request.sampling,
        "return_logprob": logprobs,
        "top_logprobs_num": others,
        "stream": streamed,
    }
    if rid:
        body["rid"] = rid
    answer = Answer()
    try:
        with requests.post(f"{url}/generate", json=body, stream=streamed, timeout=(30, ANSWER_SECONDS)) as reply:
            if not reply.ok:
                answer.error = f"{reply.status_code}: {reply.text[:300]}"
            elif streamed:
                _read_stream(reply, answer, drop_after, logprobs)
            else:
                for item in reply.json():
                    _read_item(item, answer)
                    answer.continuations.append(_tokens(item, logprobs) or [])
    except requests.Timeout:
        answer.lost = True
    except (requests.RequestException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def _read_stream(reply: requests.Response, answer: Answer, drop_after: int | None, logprobs: bool) -> None:
    tokens: list[Token] = []
    last = 0.0
    for line in reply.iter_lines():
        if not line.startswith(b"data: {"):
            continue
        item = json.loads(line[len(b"data: ") :])
        if "error" in item:
            answer.error = str(item["error"])[:300]
            return
        now = time.monotonic()
        answer.longest_pause = max(answer.longest_pause, now - last if last else 0.0)
        last = now
        if (so_far := _tokens(item, logprobs)) is not None:
            tokens = so_far
        _read_item(item, answer)
        if drop_after is not None and len(tokens) >= drop_after:
            answer.aborted = True
            break
    answer.continuations.append(tokens)


def _read_item(item: dict[str, Any], answer: Answer) -> None:
    about = item["meta_info"]
    answer.retractions = max(answer.retractions, about.get("num_retractions") or 0)
    reason = about.get("finish_reason") or {}
    answer.aborted = answer.aborted or reason.get("type") == "abort"


def _tokens(item: dict[str, Any], logprobs: bool) -> list[Token] | None:
    """None in the server's last word on an aborted request, which has some of them or none."""
    about = item["meta_info"]
    if (about.get("finish_reason") or {}).get("type") == "abort":
        return None
    ids: list[int] = item.get("output_ids") or []
    if not logprobs:
        return [Token(token, 0.0) for token in ids]
    if (told := about.get("output_token_logprobs")) is None:
        return None
    best = about.get("output_top_logprobs") or [None] * len(told)
    tokens = [
        Token(token, logprob, tuple((other, at) for at, other, *_ in beside or ()))
        for (logprob, token, *_), beside in zip(told, best, strict=False)
    ]
    # SGLang before 0.5.20 never tells the logprob of the first token if the request was retracted before it had one.
    told_ids = [token.id for token in tokens]
    lacks_first = told_ids != ids[: len(told_ids)] and told_ids == ids[1 : 1 + len(told_ids)]
    return [Token(ids[0], nan), *tokens] if lacks_first else tokens
