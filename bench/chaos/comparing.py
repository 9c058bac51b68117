"""Compares an answer with that of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from bench.chaos.asking import Answer, Token
from bench.chaos.workload import Request

Ask = Callable[[Request], Answer]
_TIE = 0.5  # difference of logprobs; selecting another block because of a last bit has been seen to cause 0.2
_FAR = 48  # tokens from a retraction to the first token that it changes; no answer is longer


def wrong_tokens(expected: Answer, given: Answer, exact: bool = True) -> int:
    """Return the number of tokens that differ. An aborted answer may be short; ``exact`` compares logprobs, too."""
    if len(given.continuations) != len(expected.continuations) and not given.aborted:
        return sum(map(len, expected.continuations))
    wrong = 0
    for right, tokens in zip(expected.continuations, given.continuations, strict=False):
        if not given.aborted:
            wrong += abs(len(right) - len(tokens))
        wrong += sum(not _same(a, b, exact) for a, b in zip(right, tokens, strict=False))
    return wrong


def wrong_but_for_ties(undisturbed: Sequence[Answer], given: Answer) -> tuple[int, int]:
    """Return the number of wrong tokens, and of continuations that left the right one at a tie.

    This is for numbers that round differently from batch to batch. Each continuation has to match that of one of the
    ``undisturbed`` answers. A tie is a place where the undisturbed run found the other token about as good. After a tie
    nothing can be compared.
    """
    wrong = ties = 0
    for number, tokens in enumerate(given.continuations):
        outcomes = [_leaves(answer.continuations[number], tokens, given.aborted) for answer in undisturbed]
        least_wrong, left_at_tie = min(outcomes)
        wrong += least_wrong
        ties += left_at_tie
    return wrong, ties


def _leaves(right: list[Token], tokens: list[Token], aborted: bool) -> tuple[int, bool]:
    """Return the number of wrong tokens, and True if ``tokens`` left ``right`` at a tie."""
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
    """Return True if a retracted request went on like a new request with the old prompt and the tokens so far.

    A retracted request's tokens are computed again, all at once and with full attention: their keys and values, and so
    the tokens that follow, may differ a little from those of decode steps. ``ask`` returns undisturbed answers. Unless
    ``exact``, the two requests may part at a tie.
    """
    if request.grammar:  # a grammar cannot start in its middle; its prompts are so short that attention is full anyway
        return False
    return all(
        _is_resumed(request, right, tokens, ask, exact)
        for right, tokens in zip(expected.continuations, given.continuations, strict=True)
    )


def _is_resumed(request: Request, right: list[Token], tokens: list[Token], ask: Ask, exact: bool) -> bool:
    """Return True if retractions explain ``tokens``: any number of them, each at or before the first other token."""
    agreed = _agreeing(right, tokens)
    while agreed < len(tokens):
        for said in range(agreed, max(-1, agreed - _FAR), -1):
            ids = (*request.ids, *(token.id for token in tokens[:said]))
            resumed = ask(replace(request, ids=ids, new_tokens=len(tokens) - said, answers=1)).continuations[0]
            reaches = said + _agreeing(resumed, tokens[said:])
            if not exact and agreed <= reaches < len(tokens) and _is_tie(resumed[reaches - said], tokens[reaches]):
                return True  # after a tie nothing can be compared
            if reaches > agreed:
                agreed = reaches
                break
        else:
            return False
    return True


def _agreeing(right: list[Token], tokens: list[Token]) -> int:
    """Return the number of leading tokens with equal ids. Logprobs are ignored: a retraction changes them."""
    pairs = zip(right, tokens, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a.id != b.id), min(len(right), len(tokens)))
