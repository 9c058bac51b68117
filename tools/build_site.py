"""Build the documentation site: stage the documents and the files that they link to, then run mkdocs.

    python -m tools.build_site [--stage-only]

Documents link to other files of the repository, such as results and examples. The site is built from a copy with the
same layout, so that the same links work in the site. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
STAGED = ROOT / "build" / "site-source"
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


class BrokenLink(ValueError):
    """A document links to a file that the repository does not have."""


def pages() -> list[Path]:
    """Return the documents of the site, in the order of mkdocs.yml."""
    return [Path(name) for name in _names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]


def _names(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        return [name for value in nav.values() for name in _names(value)]
    assert isinstance(nav, list)
    return [name for value in nav for name in _names(value)]


def links(page: Path) -> list[Path]:
    """Return the files that ``page`` links to, relative to the repository. Raise BrokenLink if one does not exist."""
    found = []
    for target in _LINK.findall(_FENCE.sub("", (ROOT / page).read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (ROOT / page).parent / target
        if not path.exists() or not path.resolve().is_relative_to(ROOT):
            raise BrokenLink(f"{page} links to {target}, which does not exist")
        found.append(path.resolve().relative_to(ROOT))
    return found


def stage(target: Path = STAGED) -> list[Path]:
    """Copy the documents and the files that they link to into ``target``. Return the paths of what was copied.

    A linked folder becomes a page that shows its text files.
    """
    shutil.rmtree(target, ignore_errors=True)
    copied: list[Path] = []
    for page in pages():
        for path in (page, *links(page)):
            if path in copied:
                continue
            if (ROOT / path).is_dir():
                _stage_folder(path, target)
            else:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, target / path)
            copied.append(path)
    for page in pages():
        _name_pages_of_folders(target / page, page)
    return copied


def _stage_folder(folder: Path, target: Path) -> None:
    """Write a page with the folder's text files, because a site has no listings of folders as GitHub has."""
    (target / folder).mkdir(parents=True, exist_ok=True)
    parts = [f"# {folder}\n"]
    for file in sorted((ROOT / folder).iterdir()):
        if file.is_file() and file.suffix in (".py", ".toml", ".md", ".yaml", ".sh"):
            parts.append(f"## {file.name}\n\n````{file.suffix[1:]}\n{file.read_text()}````\n")
    (target / folder / "index.md").write_text("\n".join(parts))


def _name_pages_of_folders(staged: Path, page: Path) -> None:
    def named(match: re.Match[str]) -> str:
        path = (ROOT / page).parent / match[1]
        return match[0].replace(f"({match[1]}", f"({match[1].rstrip('/')}/index.md") if path.is_dir() else match[0]

    text = staged.read_text()
    staged.write_text(_LINK.sub(named, text))


def build() -> int:
    """Run mkdocs on the staged files and return its exit status. A warning counts as an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", "mkdocs.yml"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-only", action="store_true", help="copy the documents, and run nothing")
    args = parser.parse_args()
    try:
        print(f"{len(stage())} files staged in {STAGED.relative_to(ROOT)}")
    except BrokenLink as broken:
        sys.exit(str(broken))
    if not args.stage_only:
        status = build()
        if status == 0:
            print("built: build/site/index.html")
        sys.exit(status)


if __name__ == "__main__":
    main()
