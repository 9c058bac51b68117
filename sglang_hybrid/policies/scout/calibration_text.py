"""The mixed text on which a predictor is fitted, unless the user names another text.

A predictor is best on kinds of text that it was fitted on, so the text has several: prose and source code that every
Python contains, tables and records, facts with questions about them, and a few languages. Every start uses the same
text.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random

Encode = Callable[[str], Sequence[int]]
Window = tuple[int, ...]

WINDOW_TOKENS = 2048
_TOKENS_PER_CHANNEL = 16  # of the hidden size: a regression needs several times as many tokens as it has inputs
_FEWEST, _MOST = 8192, 65536
_MOST_CHARACTERS = 50  # per token, on average over a piece of text; tokenizers have 1 to 8

_SOURCES = (
    "argparse", "inspect", "typing", "tarfile", "http.client", "asyncio.base_events", "decimal", "_pydecimal",
    "email.message", "json.decoder", "logging", "statistics", "turtle", "unittest.mock",
)  # fmt: skip
_PLACES = ("harbour", "archive", "workshop", "orchard", "museum", "station", "library", "laboratory", "market", "mill")
_THINGS = ("ladder", "lantern", "ledger", "compass", "kettle", "anvil", "telescope", "violin", "barrel", "engine")
_NAMES = ("Amara", "Bruno", "Chiara", "Daichi", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Keiko", "Lucia")
# ruff: noqa: RUF001 (punctuation of other languages)
_LANGUAGES = (
    "Der Zug nach {place} fährt heute zehn Minuten später ab, weil {name} noch {number} Kisten verladen muss.",
    "Im Bericht steht, dass {name} im vergangenen Jahr {number} Messungen ausgewertet und zwei davon verworfen hat.",
    "Le conseil a décidé que {name} recevrait {number} exemplaires du rapport avant la fin du mois de mars.",
    "Quand la pluie cessa, {name} compta les {number} chaises du jardin et ferma lentement la porte du {place}.",
    "La profesora explicó que el resultado {number} no cambia si se invierte el orden de los dos sumandos.",
    "{name} guardó las llaves del {place} en un cajón que nadie había abierto durante {number} días.",
    "会议决定由{name}负责整理这{number}份文件，并在星期五之前把它们送到图书馆。",
    "实验结果表明，温度每升高一度，反应所需的时间就会缩短大约百分之{number}。",
    "{name}さんは駅の近くの店で{number}円の傘を買い、雨がやむまでそこで待っていました。",
    "По дороге домой {name} заметил, что в старом доме снова горит свет, хотя там {number} лет никто не жил.",
)


@dataclass(frozen=True)
class CalibrationText:
    """Windows of tokens to fit a predictor on, and ``unseen`` windows for the choice of its penalty and rank.

    ``special``: windows with tokens that texts do not contain. No predictor is fitted on them. Ranges of channels are
    measured on all windows.
    """

    fit: tuple[Window, ...]
    unseen: tuple[Window, ...]
    special: tuple[Window, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, (*self.fit, *self.unseen, *self.special)))


class NoWords(ValueError):
    """A tokenizer has no vocabulary. Transformers creates such a tokenizer for a model without tokenizer files."""


def calibration_text(encode: Encode, hidden: int, longest: int, tokens: int | None = None) -> CalibrationText:
    """Return text for a model of hidden size ``hidden``, whose context is at most ``longest`` tokens.

    ``tokens``: number of tokens to fit on, rounded up to whole windows; None: as many as a regression needs. Raise
    NoWords if the tokenizer has no vocabulary.
    """
    window, count = _windows_for(hidden, longest)
    if tokens is not None:
        count = -(-tokens // window)
    kinds = {name: _Kind(make(), encode, window) for name, make in _KINDS.items()}
    # the kinds that servers see most often come most often
    order = ("prose", "code", "facts", "code", "records", "prose", "languages", "prose", "code")
    fit = tuple(kinds[name].next() for name in islice(cycle(order), count))
    return CalibrationText(fit, tuple(kinds[name].next() for name in ("prose", "code", "facts")))


def without_tokenizer(vocabulary: int, hidden: int, longest: int) -> CalibrationText:
    """Return random tokens for a model without a tokenizer, with frequent and rare ones as in a text (Zipf)."""
    window, count = _windows_for(hidden, longest)
    random = Random(0)
    ranks = list(range(vocabulary))
    random.shuffle(ranks)
    weights = [1 / (rank + 10) for rank in range(vocabulary)]
    drawn = [tuple(random.choices(ranks, weights, k=window)) for _ in range(count + 2)]
    return CalibrationText(tuple(drawn[:-2]), tuple(drawn[-2:]))


def _windows_for(hidden: int, longest: int) -> tuple[int, int]:
    window = min(WINDOW_TOKENS, longest)
    tokens = min(_MOST, max(_FEWEST, _TOKENS_PER_CHANNEL * hidden))
    return window, max(2, -(-tokens // window))


class _Kind:
    """Windows of one kind of text, one after the other, without overlap."""

    def __init__(self, pieces: Iterator[str], encode: Encode, window: int) -> None:
        self._pieces, self._encode, self._window = pieces, encode, window
        self._tokens: list[int] = []

    def next(self) -> Window:
        while len(self._tokens) < self._window:
            piece = next(self._pieces)
            tokens = self._encode(piece)
            if len(tokens) * _MOST_CHARACTERS < len(piece):
                raise NoWords(f"{len(piece)} characters of text are {len(tokens)} tokens")
            self._tokens += tokens
        taken, self._tokens = self._tokens[: self._window], self._tokens[self._window :]
        return tuple(taken)


def _prose() -> Iterator[str]:
    """Return the topics of Python's language reference, in an endless loop."""
    from pydoc_data.topics import topics

    return cycle(f"{topics[key]}\n\n" for key in sorted(topics))


def _code() -> Iterator[str]:
    """Return parts of the sources of some modules that every Python has, in an endless loop."""
    found = [importlib.util.find_spec(name) for name in _SOURCES]
    files = [Path(spec.origin) for spec in found if spec and spec.origin and spec.origin.endswith(".py")]
    # a Python without sources: take this file
    sources = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    pieces = [_pieces(text) for text in sources or [Path(__file__).read_text()]]
    longest = max(map(len, pieces))
    return cycle(of_file[n] for n in range(longest) for of_file in pieces if n < len(of_file))  # files in turn


def _pieces(text: str, characters: int = 6_000) -> list[str]:
    """Split a file into parts. The first part is mostly comments and imports, and is left out of long files."""
    return [text[start : start + characters] for start in range(0, len(text), characters)][1:] or [text]


def _records() -> Iterator[str]:
    random = Random(1)
    while True:
        rows = [_record(random) for _ in range(40)]
        yield "\n".join(json.dumps(row) for row in rows[:15]) + "\n\n"
        columns = list(rows[0])
        table = [" | ".join(str(row[column]) for column in columns) for row in rows[15:30]]
        yield "\n".join([" | ".join(columns), *table]) + "\n\n"
        yield "\n".join(f"{key}: {value}" for row in rows[30:] for key, value in row.items()) + "\n\n"


def _record(random: Random) -> dict[str, object]:
    return {
        "id": random.randrange(10**6),
        "name": random.choice(_NAMES),
        "place": random.choice(_PLACES),
        "item": random.choice(_THINGS),
        "price": round(random.uniform(1, 500), 2),
        "date": f"20{random.randrange(10, 30)}-{random.randrange(1, 13):02}-{random.randrange(1, 29):02}",
        "code": f"{random.getrandbits(64):016x}",
        "sold": random.random() < 0.5,
    }


def _facts() -> Iterator[str]:
    """Yield facts, and questions about some of them, for which attention goes far back."""
    random = Random(2)
    while True:
        facts = [
            (random.choice(_NAMES), random.choice(_THINGS), random.choice(_PLACES), random.randrange(10**4, 10**5))
            for _ in range(20)
        ]
        yield (
            " ".join(
                f"{name} left the {thing} numbered {number} at the {place}." for name, thing, place, number in facts
            )
            + "\n"
        )
        asked = random.sample(facts, 5)
        yield (
            "".join(
                f"\nQuestion: Which number does the {thing} have that {name} left at the {place}?\nAnswer: {number}\n"
                for name, thing, place, number in asked
            )
            + "\n"
        )


def _languages() -> Iterator[str]:
    random = Random(3)
    while True:
        sentence = random.choice(_LANGUAGES)
        yield sentence.format(
            name=random.choice(_NAMES), place=random.choice(_PLACES), number=random.randrange(2, 1000)
        ) + random.choice((" ", "\n", "\n\n"))


_KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "prose": _prose, "code": _code, "records": _records, "facts": _facts, "languages": _languages,
}  # fmt: skip
