"""Prompt template, answer length and metric of each LongBench dataset.

These are not the settings of LongBench's own scripts, whose Rouge, edit similarity and Chinese word splitting need
further packages. F1 of words replaces these metrics. Compare such scores between policies, not with published tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Metric = Literal["F1", "contains"]

_QUESTION = "{context}\n\nQuestion: {input}\nAnswer:"
_SUMMARY = "{context}\n\nWrite a one-page summary of the text above.\n\nSummary:"
_EXAMPLES = "{context}\n{input}"  # both parts are examples of the same form, the last one without its answer
_CODE = "{context}{input}"


@dataclass(frozen=True)
class Dataset:
    template: str = _QUESTION
    new_tokens: int = 64
    metric: Metric = "F1"
    # Score only the first line: base models continue with a question of their own after the answer.
    first_line: bool = True


_DATASETS = {
    "narrativeqa": Dataset(new_tokens=128),
    "qasper": Dataset(new_tokens=128),
    "multifieldqa_en": Dataset(),
    "multifieldqa_zh": Dataset(),
    "hotpotqa": Dataset(new_tokens=32),
    "2wikimqa": Dataset(new_tokens=32),
    "musique": Dataset(new_tokens=32),
    "dureader": Dataset(new_tokens=128),
    "gov_report": Dataset(_SUMMARY, 512, first_line=False),
    "multi_news": Dataset(_SUMMARY, 512, first_line=False),
    "vcsum": Dataset(_SUMMARY, 512, first_line=False),
    "qmsum": Dataset(new_tokens=512, first_line=False),
    "trec": Dataset(_EXAMPLES, 64, "contains"),
    "lsht": Dataset(_EXAMPLES, 64, "contains"),
    "triviaqa": Dataset(_EXAMPLES, 32),
    "samsum": Dataset(_EXAMPLES, 128),
    "passage_count": Dataset(
        "{context}\n\nSome of the paragraphs above are repeated. The number of different paragraphs is", 32, "contains"
    ),
    "passage_retrieval_en": Dataset(
        "{context}\n\nThe following is an abstract of one of the paragraphs above.\n\n{input}\n\n"
        "The abstract is from",
        32,
        "contains",
    ),
    "passage_retrieval_zh": Dataset("{context}\n\n以下是其中一段的摘要：\n\n{input}\n\n摘要来自", 32, "contains"),  # noqa: RUF001
    "lcc": Dataset(_CODE),
    "repobench-p": Dataset(_CODE),
}  # fmt: skip


def dataset(name: str) -> Dataset:
    """Return a dataset's settings. An unknown name gets the settings of questions and answers.

    The suffix ``_e`` marks LongBench-E: the same datasets with other lengths.
    """
    return _DATASETS.get(name.removesuffix("_e"), Dataset())
