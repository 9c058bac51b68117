"""Sends a request to a server over HTTP and parses the answer."""

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
    others: tuple[tuple[int, float], ...] = ()  # the best tokens of this place with their logprobs, if requested


@dataclass
class Answer:
    """Answer to one request: the tokens of each continuation, and whether it was disturbed or failed."""

    continuations: list[list[Token]] = field(default_factory=list)
    retractions: int = 0
    longest_pause: float = 0.0  # between two tokens
    aborted: bool = False  # the server said so, or this client closed the connection
    error: str = ""  # the server's or the client's error instead of an answer
    lost: bool = False  # nothing came within ANSWER_SECONDS

    @property
    def ids(self) -> list[list[int]]:
        return [[token.id for token in tokens] for tokens in self.continuations]


def ask(
    url: str, request: Request, drop_after: int | None = None, rid: str = "", logprobs: bool = True, others: int = 0
) -> Answer:
    """Send ``request`` and return its answer. Errors and timeouts are noted in the answer, not raised.

    ``drop_after``: close the connection after so many tokens. ``rid``: a name by which the request can be aborted.
    Without ``logprobs`` every logprob is 0. ``others``: number of best tokens to get with each token.
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
    """Return the tokens so far, or None: the last message on an aborted request has only some of its tokens or none."""
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
    # SGLang before 0.5.20 never sends the logprob of the first token if the request was retracted before it had one.
    told_ids = [token.id for token in tokens]
    lacks_first = told_ids != ids[: len(told_ids)] and told_ids == ids[1 : 1 + len(told_ids)]
    return [Token(ids[0], nan), *tokens] if lacks_first else tokens
