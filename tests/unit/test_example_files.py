"""Examples are short, and their instructions name commands, settings and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_hybrid.cli import COMMANDS
from sglang_hybrid.config_flags import config_of_arguments

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ("openai_client", "langchain")
MOST_LINES = 60


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_is_a_short_script_with_a_short_description(name: str) -> None:
    (script,) = (ROOT / "examples" / name).glob("*.py")
    text = script.read_text(encoding="utf-8")
    compile(text, str(script), "exec")
    assert len(text.splitlines()) <= MOST_LINES
    assert len((ROOT / "examples" / name / "README.md").read_text(encoding="utf-8").splitlines()) <= 20


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir()))
def test_commands_settings_and_files_of_a_description_exist(folder: str) -> None:
    text = (ROOT / "examples" / folder / "README.md").read_text(encoding="utf-8")
    for command, flags in re.findall(r"^sglang-hybrid (\w+)(.*)$", text, re.MULTILINE):
        assert command in COMMANDS
        if folder in CLIENTS:  # another example's settings are known once its package is installed
            config_of_arguments(flags.partition("#")[0].split())  # raises ConfigError
    assert all((ROOT / file).is_file() for file in re.findall(r"\bexamples/[\w/]+\.py", text))
