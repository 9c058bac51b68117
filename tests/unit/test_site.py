"""The documentation site has every document and no broken link."""

from __future__ import annotations

import importlib.util
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import build_site
import pytest

ROOT = build_site.ROOT


class Page(HTMLParser):
    """Parses an HTML file into the targets of its links and the names of its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def test_every_document_is_in_the_navigation() -> None:
    there = {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")}
    assert there <= set(build_site.pages())


def test_a_link_to_nothing_stops_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[there](https://example.org) and [nowhere](other.md#part)\n")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    with pytest.raises(build_site.BrokenLink, match=r"page.md links to other.md"):
        build_site.links(Path("page.md"))
    (tmp_path / "other.md").write_text("# Part\n")
    assert build_site.links(Path("page.md")) == [Path("other.md")]


def test_links_in_code_are_no_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```\n[nowhere](other.md)\n```\n")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    assert build_site.links(Path("page.md")) == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs-material: requirements/dev.txt")
def test_the_built_site_has_no_broken_link_and_loads_nothing_from_elsewhere() -> None:
    build_site.stage()
    assert build_site.build() == 0
    site = ROOT / "build" / "site"
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= len(build_site.pages())
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = path.parent / unquote(parts.path) if parts.path else path
            known = pages[file.resolve()].anchors if file.resolve() in pages else None
            if not file.exists() or (parts.fragment and known is not None and unquote(parts.fragment) not in known):
                broken.append(f"{path.relative_to(site)} -> {target}")
    assert not broken
    # files that a browser fetches by itself, not links that a reader may follow
    fetched = [
        f"{path.relative_to(site)}: {line.strip()[:120]}"
        for path in pages
        for line in path.read_text(encoding="utf-8").splitlines()
        if ("<script" in line or 'rel="stylesheet"' in line) and ("//" in line.split("src=", 1)[-1][:12])
    ]
    assert not fetched


def test_log_lines_that_operators_are_told_of_exist_in_the_code() -> None:
    table = (ROOT / "docs" / "guide" / "operations.md").read_text().split("## Log lines", 1)[1].split("\n## ", 1)[0]
    quoted = [line.split('"')[1] for line in table.splitlines() if line.startswith('| "')]
    code = "".join(path.read_text() for path in (ROOT / "sglang_hybrid").rglob("*.py"))
    joined = code.replace('"\n            "', "")  # one sentence over two lines
    assert quoted and [phrase for phrase in quoted if phrase not in joined] == []
