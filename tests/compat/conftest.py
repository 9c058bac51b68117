"""Tests of the code that imports or patches SGLang. They load the plugin into this process, which cannot be undone."""

import pytest

from sglang_hybrid.integration.activate import load_plugin


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    load_plugin()
