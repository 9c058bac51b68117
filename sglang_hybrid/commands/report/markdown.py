"""A report as Markdown, with its figures beside it."""

from __future__ import annotations

from pathlib import Path

from sglang_hybrid.commands.report import svg
from sglang_hybrid.commands.report.content import Element, Figure, Report, Section, Table
from sglang_hybrid.commands.report.page import origin_facts

FIGURES = "figures"


def write_markdown(path: Path, report: Report) -> None:
    """Write ``path`` and a figure file for each figure in the folder ``figures`` beside it."""
    folder = path.parent / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    for section in report.sections:
        for element in section.elements:
            if isinstance(element, Figure):
                drawn = svg.as_file(svg.svg_of(element.drawing, element.name))
                (folder / f"{element.name}.svg").write_text(drawn, encoding="utf-8")
    path.write_text(text_of(report), encoding="utf-8")


def text_of(report: Report) -> str:
    lines = [f"# {_plain(report.title)}", ""]
    lines += [f"- {_plain(name)}: {_plain(value)}" for name, value in report.facts]
    lines += ["", "| experiment | paper | status |", "|---|---|---|"]
    lines += [
        f"| [{_plain(one.title)}](#{_anchor(one)}) | {_plain(one.paper)} | {one.status} |" for one in report.sections
    ]
    for section in report.sections:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {_heading(section)}", "", f"{_plain(section.question)} ({section.status})"]
    for element in section.elements:
        lines += ["", *_element(section, element)]
    facts = [("command", f"`{section.command}`" if section.command else ""), *origin_facts(section)]
    lines += ["", *(f"- {name}: {value if name == 'command' else _plain(value)}" for name, value in facts if value)]
    if section.settings:
        lines += ["", "```", *section.settings, "```"]
    return lines


def _element(section: Section, element: Element) -> list[str]:
    if isinstance(element, Figure):
        return [f"![{_plain(element.caption)}]({FIGURES}/{element.name}.svg)", "", _plain(element.caption)]
    if isinstance(element, Table):
        head = f"| {' | '.join(_cell(cell) for cell in element.head)} |"
        rule = f"|{'|'.join(['---', *['---:'] * (len(element.head) - 1)])}|"
        return [
            f"**{_plain(element.caption)}**",
            "",
            head,
            rule,
            *(f"| {' | '.join(map(_cell, row))} |" for row in element.rows),
        ]
    if section.status == "failed":
        return ["```", *element.text.replace("```", "'''").splitlines(), "```"]
    return [f"> {'**Warning:** ' if element.kind == 'warning' else ''}{_plain(element.text)}"]


def _heading(section: Section) -> str:
    return _plain(section.title if section.paper == "all" else f"{section.paper}: {section.title}")


def _anchor(section: Section) -> str:
    """Return the anchor that GitHub makes of the section's heading."""
    kept = (letter for letter in _heading(section).lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
    return "".join(kept)


def _plain(text: str) -> str:
    """Return ``text`` as one line, with the characters escaped that Markdown takes for markup."""
    line = " ".join(text.split())
    for mark in ("\\", "`", "*", "_", "<", "[", "]"):
        line = line.replace(mark, f"\\{mark}")
    return line


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
