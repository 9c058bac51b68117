"""Tests of the seam to SGLang. They load the plugin into this process, for good."""

import pytest

from sglang_hybrid.integration.activate import load_plugin


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    load_plugin()
