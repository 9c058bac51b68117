"""README and docs: tables match the code, links have targets, every result is linked, and figures are right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import generate_docs
import pytest

from sglang_hybrid import env
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.capacity import GIB, KVShape

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
FEATURES = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
MOST_FEATURES_NOT_TRIED = 5
SHAPES = {  # layers, KV heads, head_dim, from each model's config.json
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-Coder-1.5B": (28, 2, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-14B": (40, 8, 128),
}


def test_generated_documents_are_up_to_date() -> None:
    assert [str(path) for path in generate_docs.outdated(ROOT)] == [], "run python tools/generate_docs.py"


def test_generated_tables_have_every_setting_and_every_environment_variable() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", CONFIGURATION, re.MULTILINE))
    defaults = HybridConfig().by_key()
    shown = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in defaults.items()}
    assert {key: rows.get(key) for key in shown} == {key: f"`{value}`" for key, value in shown.items()}
    assert not {key for key in rows if key.islower()} - set(shown)
    assert {variable.name for variable in env.VARIABLES} <= set(rows)


def test_a_check_of_documents_says_which_are_old_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (generate_docs.DEFAULT_YAML, *generate_docs.WITH_TABLES):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    assert generate_docs.main(["--check"]) == 0
    (tmp_path / "configs/default.yaml").write_text("policy: full\n")
    assert generate_docs.main(["--check"]) == 1
    assert "configs/default.yaml; run python tools/generate_docs.py" in capsys.readouterr().err
    assert generate_docs.main([]) == 0 == generate_docs.main(["--check"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    broken = []
    for link, target, anchor in links(document):
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_result_is_linked_from_a_document() -> None:
    linked = {target for document in DOCUMENTS for _, target, _ in links(document)}
    results = {path for path in (ROOT / "bench" / "results").rglob("*") if path.is_file()}
    assert {str(path.relative_to(ROOT)) for path in results - linked} == set()


def links(document: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (link as written, file, anchor) for each link to a file of this repository."""
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            yield link, (document.parent / file).resolve() if file else document, anchor


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("model", SHAPES)
def test_tokens_per_gib_follow_from_the_shape_of_the_model(model: str) -> None:
    layers, kv_heads, head_dim = SHAPES[model]
    halves, floats = (KVShape(layers, kv_heads, head_dim, head_dim, size).bytes_per_token for size in (2, 4))
    row = f"| {model} | {halves / 1024:g} KiB | {GIB // halves:,} | {GIB // floats:,} |"
    assert row in (ROOT / "README.md").read_text(encoding="utf-8")


def feature_rows() -> list[tuple[str, str, str]]:
    """Return (feature, state, test or sentence) of every row of the table of features."""
    rows = re.findall(r"^\| (.+) \| ((?:tested|refused|not tried)[^|]*) \|(.*)\|$", FEATURES, re.MULTILINE)
    return [(feature, state, shown) for feature, state, shown in rows if state != shown]


def named_tests(text: str) -> list[tuple[str, str, str]]:
    """Return (file, function, parameter or an empty string) of every test id in a text."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`", text)


@pytest.mark.parametrize(("file", "function", "parameter"), sorted(set(named_tests(FEATURES))))
def test_every_test_that_the_table_of_features_names_exists(file: str, function: str, parameter: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert f"\ndef {function}(" in source
    assert not parameter or f'"{parameter}"' in source


def test_every_feature_has_a_state_and_what_shows_it() -> None:
    rows = feature_rows()
    tables = [line for line in FEATURES.splitlines() if line.startswith("| ") and line.count(" | ") >= 2]
    assert len(rows) == len([line for line in tables if not line.startswith("| feature |")]) > 60
    for feature, state, shown in rows:
        if state.startswith("tested"):
            assert named_tests(shown), feature
        if state.startswith("refused"):
            assert named_tests(shown) or re.search(r'"[^"]{20,}"', shown), feature
    assert len([state for _, state, _ in rows if state == "not tried"]) <= MOST_FEATURES_NOT_TRIED


def test_every_refusal_of_a_flag_is_among_the_features_with_its_sentence() -> None:
    from sglang_hybrid.integration.refusals import _FLAGS

    assert [sentence for _, sentence in _FLAGS if f'"{sentence}"' not in FEATURES] == []
