"""Whether an answer is the one of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from bench.chaos.asking import Answer, Token
from bench.chaos.workload import Request

Ask = Callable[[Request], Answer]
_TIE = 0.5  # in logprob: selecting another block because of a last bit has been seen to make 0.2
_FAR = 48  # tokens between a retraction and what it changes; no answer is longer


def wrong_tokens(expected: Answer, given: Answer, exact: bool = True) -> int:
    """Tokens that are not the expected ones. An aborted answer may be short; ``exact`` compares logprobs, too."""
    if len(given.continuations) != len(expected.continuations) and not given.aborted:
        return sum(map(len, expected.continuations))
    wrong = 0
    for right, tokens in zip(expected.continuations, given.continuations, strict=False):
        if not given.aborted:
            wrong += abs(len(right) - len(tokens))
        wrong += sum(not _same(a, b, exact) for a, b in zip(right, tokens, strict=False))
    return wrong


def wrong_but_for_ties(undisturbed: Sequence[Answer], given: Answer) -> tuple[int, int]:
    """Tokens that are wrong, and continuations that left the right one at a tie: for numbers that round differently
    from batch to batch. Each continuation has to be that of one of the ``undisturbed`` answers.

    A tie is a place where the other token was about as good in the undisturbed run. Behind it nothing can be compared.
    """
    wrong = ties = 0
    for number, tokens in enumerate(given.continuations):
        outcomes = [_leaves(answer.continuations[number], tokens, given.aborted) for answer in undisturbed]
        least_wrong, left_at_tie = min(outcomes)
        wrong += least_wrong
        ties += left_at_tie
    return wrong, ties


def _leaves(right: list[Token], tokens: list[Token], aborted: bool) -> tuple[int, bool]:
    """Tokens that are wrong, and whether it left at a tie."""
    place = _agreeing(right, tokens)
    if place == min(len(right), len(tokens)):
        return 0 if aborted else abs(len(right) - len(tokens)), False
    is_tie = _is_tie(right[place], tokens[place])
    return int(not is_tie), is_tie


def _is_tie(right: Token, given: Token) -> bool:
    return right.logprob - dict(right.others).get(given.id, -inf) < _TIE


def _same(a: Token, b: Token, exact: bool) -> bool:
    return a.id == b.id and (a.logprob == b.logprob or not exact)


def is_explained(request: Request, expected: Answer, given: Answer, ask: Ask, exact: bool = True) -> bool:
    """Whether a retracted request went on as a new one does whose prompt is the old one and what was said by then.

    A retracted request's tokens are computed again, all at once and with full attention: their keys and values, and so
    what follows, may differ from those of decode steps by a little. ``ask`` answers undisturbed; unless ``exact``, the
    two may part at a tie.
    """
    if request.grammar:  # cannot be begun in its middle; its prompts are so short that attention is full anyway
        return False
    return all(
        _is_resumed(request, right, tokens, ask, exact)
        for right, tokens in zip(expected.continuations, given.continuations, strict=True)
    )


def _is_resumed(request: Request, right: list[Token], tokens: list[Token], ask: Ask, exact: bool) -> bool:
    """Where the request was retracted is not known, nor how often: each time at or before the first other token."""
    agreed = _agreeing(right, tokens)
    while agreed < len(tokens):
        for said in range(agreed, max(-1, agreed - _FAR), -1):
            ids = (*request.ids, *(token.id for token in tokens[:said]))
            resumed = ask(replace(request, ids=ids, new_tokens=len(tokens) - said, answers=1)).continuations[0]
            reaches = said + _agreeing(resumed, tokens[said:])
            if not exact and agreed <= reaches < len(tokens) and _is_tie(resumed[reaches - said], tokens[reaches]):
                return True  # behind a tie nothing can be compared
            if reaches > agreed:
                agreed = reaches
                break
        else:
            return False
    return True


def _agreeing(right: list[Token], tokens: list[Token]) -> int:
    """How many first tokens are the same, as tokens: what was computed before a retraction is other numbers."""
    pairs = zip(right, tokens, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a.id != b.id), min(len(right), len(tokens)))
