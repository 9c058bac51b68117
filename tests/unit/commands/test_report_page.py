"""The HTML page and the Markdown file of a report."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sglang_hybrid.commands.report import figures, markdown, page, svg
from sglang_hybrid.commands.report.content import Figure, Note, Report, Section, Table

NASTY = '<script>alert("1 & 2")</script>'


def drawing(text: str = "tokens") -> Figure:
    drawn, (axes,) = figures.figure(4, 2)
    figures.grouped_bars(axes, ["a", "b"], {"scout": [1.0, None], "paper": [2.0, 3.0]})
    axes.set_xlabel(text)
    figures.legend(axes)
    return Figure("drawn", "What is drawn.", drawn)


def report_of(*sections: Section) -> Report:
    return Report("A report", (("model", "Tiny"), ("machine", NASTY)), sections)


def section(**changes: object) -> Section:
    origin = {
        "commit": "abc1234",
        "date": "2026-01-02",
        "machine": {"cpu": "C", "cores": 2, "gpu": None, "memory_gib": 8},
    }
    facts: dict[str, object] = {
        "name": "one", "title": "The first", "paper": "HGCA", "question": "Is it so?", "status": "measured",
        "elements": (drawing(), Table("Numbers", ("", "x|y"), (("a_b", "1"),)), Note("Mind this.", "warning")),
        "settings": ("scout: policy=scout",), "command": "sglang-hybrid report --only one", "origin": origin,
        "seconds": 3.0,
    }  # fmt: skip
    return Section(**{**facts, **changes})  # type: ignore[arg-type]


class Tags(HTMLParser):
    """Parser that collects elements with their attributes and checks that every element is closed."""

    VOID = frozenset({"meta", "br", "img", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


def tags_of(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


def test_a_page_is_one_file_that_loads_nothing() -> None:
    text = page.html_of(report_of(section()))
    for tag, attributes in tags_of(text).found:
        assert tag not in ("script", "link", "iframe", "img")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in text and "url(http" not in text


def test_everything_that_a_measurement_says_is_escaped() -> None:
    nasty = section(
        title=NASTY, question=NASTY, status="failed", command=NASTY, settings=(NASTY,),
        elements=(Note(NASTY), Table(NASTY, (NASTY,), ((NASTY,),)), drawing(NASTY)),
    )  # fmt: skip
    text = page.html_of(report_of(nasty))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    tags_of(text)


def test_contents_lead_to_every_section() -> None:
    tags = tags_of(page.html_of(report_of(section(), section(name="two", status="skipped", elements=()))))
    targets = {attributes["href"] for tag, attributes in tags.found if tag == "a"}
    assert targets == {"#one", "#two"}
    assert {f"#{attributes.get('id')}" for _, attributes in tags.found} >= targets


def test_identifiers_of_figures_do_not_clash() -> None:
    other = section(name="two", elements=(Figure("other", "Another.", drawing().drawing),))
    text = page.html_of(report_of(section(), other))
    found = re.findall(r'\bid="([^"]+)"', text)
    assert len(found) == len(set(found))
    for used in re.findall(r'href="#(drawn-[^"]+)"', text) + re.findall(r"url\(#([^)]+)\)", text):
        assert used in found


def test_figures_take_the_colour_of_the_pages_text() -> None:
    text = page.html_of(report_of(section()))
    assert figures.INK not in text
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text


def test_command_settings_commit_and_machine_stand_beside_every_section() -> None:
    text = page.html_of(report_of(section()))
    for fact in (
        "sglang-hybrid report --only one",
        "scout: policy=scout",
        "abc1234",
        "2026-01-02",
        "2 cores of C",
        "3 s",
    ):
        assert fact in text


def test_the_same_drawing_gives_the_same_text() -> None:
    assert svg.svg_of(drawing().drawing, "a") == svg.svg_of(drawing().drawing, "a")


def test_figures_beside_markdown_are_files_that_stand_alone(tmp_path: Path) -> None:
    markdown.write_markdown(tmp_path / "report.md", report_of(section()))
    drawn = (tmp_path / "figures" / "drawn.svg").read_text()
    xml.etree.ElementTree.fromstring(drawn)
    assert "#ffffff" in drawn
    text = (tmp_path / "report.md").read_text()
    assert "(figures/drawn.svg)" in text
    assert "| a\\_b | 1 |" in text
    assert "x\\|y" in text
    assert "> **Warning:** Mind this." in text


def test_markdown_has_no_markup_of_measurements() -> None:
    text = markdown.text_of(report_of(section(elements=(Note(NASTY),))))
    assert "<script" not in text.replace("\\<script", "")
    failed = markdown.text_of(report_of(section(status="failed", elements=(Note("it\n```\nfailed"),))))
    assert failed.count("```") == 4  # two around the failure, two around the settings


def test_links_of_the_markdown_table_are_those_of_its_headings() -> None:
    text = markdown.text_of(report_of(section()))
    assert "[The first](#hgca-the-first)" in text
    assert "## HGCA: The first" in text


@pytest.mark.parametrize("values", [[[1.0, None]], [[float("nan"), 2.0]]])
def test_heat_maps_leave_out_what_was_not_measured(values: list[list[float | None]]) -> None:
    drawn, (axes,) = figures.figure(3, 2)
    figures.heat_map(axes, values, ["r"], ["a", "b"], low=0, high=2)
    assert len(axes.texts) == 1
    svg.svg_of(drawn, "heat")
