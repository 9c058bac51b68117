"""A report as one HTML file that loads nothing else."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from sglang_hybrid.commands.report import svg
from sglang_hybrid.commands.report.content import Element, Figure, Note, Report, Section, Table
from sglang_hybrid.commands.report.machine import in_words

_STYLE = """\
:root { color-scheme: light dark; --ink: #1d1d22; --soft: #5c5f68; --line: #dcdde2; --ground: #fbfbfc; --card: #ffffff;
  --accent: #0b5cad; --warn: #8a4b00; --warn-ground: #fff4e2; --bad: #a3172d; --bad-ground: #fdecef; --good: #1a6b3c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e7ea; --soft: #9ea2ac; --line: #34373f; --ground: #15161a;
  --card: #1c1e23; --accent: #7db7f2; --warn: #f0b968; --warn-ground: #33270f; --bad: #f08a9b; --bad-ground: #3a1820;
  --good: #7fd1a0; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.frame { display: grid; grid-template-columns: 15rem minmax(0, 1fr); max-width: 78rem; margin: 0 auto; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow: auto; padding: 2rem 1rem 2rem 1.25rem;
  font-size: .875rem; }
nav h2 { font-size: .75rem; text-transform: uppercase; letter-spacing: .06em; color: var(--soft);
  margin: 1.2rem 0 .3rem; border: 0; padding: 0; }
nav ul { list-style: none; margin: 0; padding: 0; }
nav a { display: block; padding: .2rem .5rem; color: var(--ink); text-decoration: none; border-radius: .3rem; }
nav a:hover { background: var(--line); }
nav .skipped, nav .failed { color: var(--soft); }
main { padding: 2rem 1.5rem 5rem; min-width: 0; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 1rem; padding-bottom: .35rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1.12rem; margin: 0; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .15rem 1rem; margin: 1rem 0;
  font-size: .92rem; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
section.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1.2rem 1.4rem;
  margin: 1.2rem 0; scroll-margin-top: 1rem; }
.head { display: flex; gap: .75rem; align-items: baseline; justify-content: space-between; flex-wrap: wrap; }
.question { margin: .25rem 0 1rem; color: var(--soft); }
.badge { font-size: .75rem; padding: .1rem .55rem; border-radius: 1rem; border: 1px solid currentColor;
  white-space: nowrap; }
.badge.measured { color: var(--good); } .badge.arithmetic { color: var(--accent); }
.badge.skipped { color: var(--soft); } .badge.failed { color: var(--bad); }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figcaption, caption { color: var(--soft); font-size: .875rem; text-align: left; padding: .35rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem .32rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
p.note, p.warning, pre.failed { font-size: .9rem; margin: .8rem 0; padding: .6rem .9rem; border-radius: .4rem;
  overflow-wrap: anywhere; white-space: pre-line; }
p.note { border-left: 3px solid var(--line); padding: .1rem .9rem; color: var(--soft); border-radius: 0; }
p.warning { background: var(--warn-ground); color: var(--warn); }
pre.failed { background: var(--bad-ground); color: var(--bad); white-space: pre-wrap; }
details { font-size: .875rem; margin-top: 1rem; color: var(--soft); } summary { cursor: pointer; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .82rem; }
details pre { overflow-x: auto; padding: .6rem .8rem; background: var(--ground);
  border: 1px solid var(--line); border-radius: .4rem; }
@media (max-width: 60rem) { .frame { display: block; } nav { position: static; max-height: none; padding-bottom: 0; }
  nav ul { columns: 2; } main { padding: 1rem; } section.card { padding: 1rem; } }
@media print { nav { display: none; } .frame { display: block; } section.card { break-inside: avoid; } }
"""
_ALL = "all"


def html_of(report: Report) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
    body = "".join(
        f"<h2>{escape(_group_title(paper))}</h2>" + "".join(map(_section, sections))
        for paper, sections in _groups(report)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(report.title)}</title><style>\n{_STYLE}</style></head>\n<body><div class="frame">'
        f'{_navigation(report)}<main><h1>{escape(report.title)}</h1><dl class="facts">{facts}</dl>{body}</main></div>'
        "</body></html>\n"
    )


def _groups(report: Report) -> list[tuple[str, list[Section]]]:
    return [(paper, list(sections)) for paper, sections in groupby(report.sections, lambda one: one.paper)]


def _group_title(paper: str) -> str:
    return "Policies" if paper == _ALL else f"Experiments of {paper}"


def _navigation(report: Report) -> str:
    groups = []
    for paper, sections in _groups(report):
        entries = "".join(
            f'<li><a class="{one.status}" href="#{escape(one.name)}">{escape(one.title)}'
            f"{'' if one.status in ('measured', 'arithmetic') else f' ({one.status})'}</a></li>"
            for one in sections
        )
        groups.append(f"<h2>{escape('Policies' if paper == _ALL else paper)}</h2><ul>{entries}</ul>")
    return f'<nav aria-label="Contents">{"".join(groups)}</nav>'


def _section(section: Section) -> str:
    elements = "".join(_element(section, element) for element in section.elements)
    return (
        f'<section class="card" id="{escape(section.name)}"><div class="head"><h3>{escape(section.title)}</h3>'
        f'<span class="badge {section.status}">{section.status}</span></div>'
        f'<p class="question">{escape(section.question)}</p>{elements}{_details(section)}</section>\n'
    )


def _element(section: Section, element: Element) -> str:
    if isinstance(element, Figure):
        drawn = svg.inlined(svg.svg_of(element.drawing, element.name), element.name, escape(element.caption))
        return f"<figure>{drawn}<figcaption>{escape(element.caption)}</figcaption></figure>"
    if isinstance(element, Table):
        return _table(element)
    if section.status == "failed":
        return f'<pre class="failed">{escape(element.text)}</pre>'
    return _note(element)


def _note(note: Note) -> str:
    return f'<p class="{note.kind}">{escape(note.text)}</p>'


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table><caption>{escape(table.caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _details(section: Section) -> str:
    lines = [("command", section.command), *((name, value) for name, value in origin_facts(section))]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines if value)
    settings = f"<pre>{escape(chr(10).join(section.settings))}</pre>" if section.settings else ""
    return f'<details><summary>Command, settings, machine</summary><dl class="facts">{facts}</dl>{settings}</details>'


def origin_facts(section: Section) -> list[tuple[str, str]]:
    """Return commit, date, machine, duration and load average of a section as (name, text) pairs."""
    origin: dict[str, Any] = section.origin
    if not origin:
        return []
    commit = (origin.get("commit") or "unknown") + (
        " with uncommitted changes" if origin.get("uncommitted_changes") else ""
    )
    facts = [("commit", commit), ("date", origin.get("date", "")), ("machine", in_words(origin["machine"]))]
    if section.seconds is not None:
        facts.append(("took", f"{section.seconds:.0f} s"))
    if load := origin.get("load_average"):
        facts.append(("load average", f"{load[0]} before, {load[1]} after"))
    return facts
