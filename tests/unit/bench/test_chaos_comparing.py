"""Which answers a chaos run accepts as right."""

from __future__ import annotations

import pytest

from bench.chaos.asking import Answer, Token
from bench.chaos.comparing import is_explained, wrong_but_for_ties, wrong_tokens
from bench.chaos.workload import Request

REQUEST = Request(0, (7, 8, 9), new_tokens=4)


def answer(*ids: int, best: dict[int, float] | None = None, aborted: bool = False) -> Answer:
    """Return an answer in which every token has logprob -1 and the alternatives ``best``, token to logprob."""
    return Answer([[Token(token, -1.0, tuple((best or {}).items())) for token in ids]], aborted=aborted)


def test_every_other_token_counts_and_so_does_a_missing_one() -> None:
    assert wrong_tokens(answer(1, 2, 3), answer(1, 2, 3)) == 0
    assert wrong_tokens(answer(1, 2, 3), answer(1, 5, 6)) == 2
    assert wrong_tokens(answer(1, 2, 3), answer(1, 2)) == 1
    assert wrong_tokens(answer(1, 2, 3), answer(1, 2, aborted=True)) == 0


def test_a_token_that_was_about_as_good_is_a_tie() -> None:
    best = {5: -1.4, 6: -1.6}
    undisturbed = [answer(1, 2, best=best)]
    assert wrong_but_for_ties(undisturbed, answer(1, 5)) == (0, 1)
    assert wrong_but_for_ties(undisturbed, answer(1, 6)) == (1, 0)
    assert wrong_but_for_ties(undisturbed, answer(1, 4)) == (1, 0)


def test_it_is_enough_to_be_one_of_the_right_answers() -> None:
    undisturbed = [answer(1, 2, 3), answer(1, 5, 6, best={7: -1.3})]
    assert wrong_but_for_ties(undisturbed, answer(1, 2, 3)) == (0, 0)
    assert wrong_but_for_ties(undisturbed, answer(1, 5, 6)) == (0, 0)
    assert wrong_but_for_ties(undisturbed, answer(1, 5, 7)) == (0, 1)
    assert wrong_but_for_ties(undisturbed, answer(1, 2, 6)) == (1, 0)


@pytest.mark.parametrize(
    ("resumed", "exact", "explained"),
    [
        (answer(5, 6, 7), True, True),  # equals the answer to the prompt plus (1,), asked as a new prompt
        (answer(4, 4, 4), True, False),
        (answer(4, best={5: -1.2}), True, False),
        (answer(4, best={5: -1.2}), False, True),  # differs from it at a tie
        (answer(4, best={5: -1.9}), False, False),
    ],
)
def test_a_retracted_answer_has_to_be_that_of_a_new_prompt(resumed: Answer, exact: bool, explained: bool) -> None:
    def ask(request: Request) -> Answer:
        return resumed if request.ids == (7, 8, 9, 1) else answer(*[0] * request.new_tokens)

    assert is_explained(REQUEST, answer(1, 2, 3, 4), answer(1, 5, 6, 7), ask, exact) == explained


def test_a_tie_before_the_difference_explains_nothing() -> None:
    def ask(request: Request) -> Answer:
        # the prompt alone gives another first token, about as likely as the first token of both answers
        return answer(9, 9, 9, 9, best={1: -1.1}) if request.ids == REQUEST.ids else answer(*[0] * request.new_tokens)

    assert not is_explained(REQUEST, answer(1, 2, 3, 4), answer(1, 5, 6, 7), ask, exact=False)
