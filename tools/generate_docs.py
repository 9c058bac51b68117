#!/usr/bin/env python3
"""Generate configs/default.yaml and the tables of docs/configuration.md and docs/metrics.md from the code.

python tools/generate_docs.py            # after a change of a setting, an environment variable or a metric
python tools/generate_docs.py --check    # status 1 and a list, if a document is not up to date

A document keeps its hand-written text. Generated text stands between ``<!-- begin generated: NAME -->`` and
``<!-- end generated -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_hybrid import env  # noqa: E402
from sglang_hybrid.config import HybridConfig, describe  # noqa: E402
from sglang_hybrid.metrics.table import METRICS, Metric  # noqa: E402
from sglang_hybrid.policies.registry import policies_with_settings  # noqa: E402
from sglang_hybrid.setting_fields import default_of, description_of, fields_of, legal_values_of  # noqa: E402

DEFAULT_YAML = Path("configs/default.yaml")
CONFIGURATION, METRICS_PAGE = WITH_TABLES = (Path("docs/configuration.md"), Path("docs/metrics.md"))
_HEADER = """\
# Every setting with its default, made by tools/generate_docs.py. Copy what you want to change into a file of your own
# and start with --hybrid-config FILE, or change single settings with --hybrid key=value, which wins over the file.
# A setting of a section has a dotted key there: --hybrid scout.recall_interval=3.

"""
_GENERATED = re.compile(r"(<!-- begin generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the documents, or check them with --check. Return the exit status: 1 if a checked document is outdated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="change nothing, and say what is not up to date")
    old = outdated(ROOT)
    if not parser.parse_args(arguments).check:
        for path, text in old.items():
            (ROOT / path).write_text(text, encoding="utf-8")
            print(path)
        return 0
    if old:
        print(f"not up to date: {', '.join(map(str, old))}; run python tools/generate_docs.py", file=sys.stderr)
    return 1 if old else 0


def outdated(root: Path) -> dict[Path, str]:
    """Return the documents below ``root`` that differ from what would be written, with the text they should have."""
    wanted = {DEFAULT_YAML: _HEADER + describe(HybridConfig())}
    wanted |= {path: with_tables((root / path).read_text(encoding="utf-8")) for path in WITH_TABLES}
    return {path: text for path, text in wanted.items() if (root / path).read_text(encoding="utf-8") != text}


def with_tables(document: str) -> str:
    """Return ``document`` with the text between its markers generated anew. Raise KeyError for an unknown marker."""
    return _GENERATED.sub(lambda found: f"{found[1]}\n{_PARTS[found[2]]()}\n{found[3]}", document)


def _settings() -> str:
    top_level = {name: field for name, field in fields_of(HybridConfig).items() if name != "sections"}
    return _table_of_settings(top_level)


def _sections() -> str:
    parts = []
    for policy in policies_with_settings():
        assert policy.settings is not None
        fields = {f"{policy.name}.{name}": field for name, field in fields_of(policy.settings).items()}
        parts.append(f"### Policy `{policy.name}`\n{_table_of_settings(fields)}")
    return "\n".join(parts)


def _table_of_settings(fields: Mapping[str, FieldInfo]) -> str:
    rows = (
        (f"`{key}`", f"`{_value(default_of(field))}`", legal_values_of(field), _marked(description_of(field)))
        for key, field in fields.items()
    )
    return _table(("setting", "default", "legal values", "meaning"), rows)


def _environment_variables() -> str:
    rows = (
        (f"`{variable.name}`", variable.type.legal, _default_of_variable(variable), variable.doc)
        for variable in env.VARIABLES
    )
    return _table(("environment variable", "value", "default", "meaning"), rows)


def _metrics() -> str:
    rows = (
        (
            f"`{metric.name}`",
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            _needs_of(metric),
            metric.meaning,
        )
        for metric in METRICS
    )
    return _table(("metric", "type", "labels", "needs", "meaning"), rows)


def _needs_of(metric: Metric) -> str:
    """Return the engines and the condition that a metric needs, for the column "needs".

    The conditions misses, worker and calibration imply one of the engines torch and cuda, so the pair is not listed.
    """
    with_metric = set(metric.engines) | ({"cpu"} if metric.when else set())
    engines = () if with_metric == {"cpu", "torch", "cuda"} else metric.engines
    return ", ".join([*engines, *filter(None, [metric.when])])


def _default_of_variable(variable: env.EnvVar[Any]) -> str:
    return "none" if variable.default is None else f"`{_value(variable.default)}`"


def _value(value: Any) -> str:
    """Return a default value as a person writes it in a file of settings."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def _marked(description: str) -> str:
    """Return ``description`` with the names of settings marked as code."""
    words = re.compile(r'(?<!")\b(?:\w+_\w+|auto)\b(?!")')
    return words.sub(lambda word: f"`{word[0]}`" if _is_setting(word[0]) else word[0], description)


def _is_setting(name: str) -> bool:
    structs = [HybridConfig, *(policy.settings for policy in policies_with_settings() if policy.settings)]
    return name == "auto" or any(name in fields_of(struct) for struct in structs)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped).replace("| --- ", "|---").replace("|--- |", "|---|")


_PARTS: dict[str, Callable[[], str]] = {
    "settings": _settings,
    "sections": _sections,
    "environment-variables": _environment_variables,
    "metrics": _metrics,
}

if __name__ == "__main__":
    sys.exit(main())
