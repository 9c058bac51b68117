"""Drawings as SVG text: for a file beside a Markdown report, or inside an HTML page."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Drawing

from sglang_hybrid.commands.report.figures import INK

_PIXELS = 1.36  # CSS pixels per point: makes the text of figures as large as the text of tables
_ID = re.compile(r'\bid="([^"]+)"')


def svg_of(drawing: Drawing, name: str) -> str:
    """Return a drawing as one ``<svg>`` element. Equal drawings give equal text: no dates, no random identifiers."""
    text = io.StringIO()
    options: dict[Any, Any] = {"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(options):
        drawing.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :].strip()


def as_file(svg: str) -> str:
    """Return the text of an SVG file with a white background: file viewers show no page behind the drawing."""
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    opened = svg.index(">", svg.index("<svg")) + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:opened]}{ground}{svg[opened:]}\n'


def inlined(svg: str, name: str, text: str) -> str:
    """Return ``svg`` for an HTML page: in the page's text colour, with identifiers prefixed by ``name``.

    The drawing shrinks with the page. ``text`` is the description for screen readers and must be escaped already.
    """
    found = set(_ID.findall(svg))
    svg = _ID.sub(lambda match: f'id="{name}-{match[1]}"', svg)
    svg = re.sub(r'href="#([^"]+)"', lambda match: f'href="#{name}-{match[1]}"' if match[1] in found else match[0], svg)
    svg = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{name}-{match[1]})" if match[1] in found else match[0], svg)
    svg = svg.replace(INK, "currentColor")
    opened = svg.index(">", svg.index("<svg"))
    points = re.search(r'\bwidth="([\d.]+)pt"', svg[:opened])
    wide = f' style="max-width:{float(points[1]) * _PIXELS:.0f}px"' if points else ""
    head = re.sub(r'\b(width|height)="[^"]*pt"\s*', "", svg[:opened])
    return f'{head}{wide} role="img" aria-label="{text}"{svg[opened:]}'
