"""Passes pip's settings to uv, which does not read them: indexes of packages, certificates, proxy.

A host whose pip finds packages must find the same packages with uv. In particular, a CPU build of torch is often
offered through a setting of pip (find-links or an extra index).
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlparse

# pip's setting -> uv's variable, and the separator of several values in that variable; pip separates by white space
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
_FILES = {"index-url", "extra-index-url", "find-links", "constraint", "cert", "client-cert"}
_SECTIONS = ("global", "install", ":env:")  # of pip's configuration; the last one wins


def read(pip: list[str] | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that ``pip install`` would use, or those in PIP_* variables if ``pip`` is None or fails."""
    if pip is not None:
        listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, env=environ, check=False)
        if listed.returncode == 0:
            return parse(listed.stdout)
    prefix = "PIP_"
    return {
        name.removeprefix(prefix).lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith(prefix) and value
    }


def parse(listed: str) -> dict[str, str]:
    """Return the settings in the output of ``pip config list``, with lines such as ``global.index-url='https://...'``."""
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        name, equals, quoted = line.partition("=")
        section, dot, key = name.rpartition(".")
        if not equals or not dot or section not in sections:
            continue
        try:
            value = ast.literal_eval(quoted)
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, str):
            sections[section][key.replace("_", "-")] = value
    return {key: value for section in _SECTIONS for key, value in sections[section].items()}


def for_uv(settings: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that give uv the same settings, without variables that the user has set."""
    variables = {
        # pip searches all indexes for the best version, uv only the first index that has the name
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        # the certificates of the host, as pip does since 24.2
        "UV_SYSTEM_CERTS": "true",
    }
    for key, (variable, separator) in _VARIABLES.items():
        values = [value for value in settings.get(key, "").split() if key not in _FILES or _may_exist(value)]
        if values:
            variables[variable] = separator.join(values)
    return {variable: value for variable, value in variables.items() if not environ.get(variable)}


def _may_exist(location: str) -> bool:
    """Return False for a local path that does not exist, which pip ignores and uv refuses."""
    url = urlparse(location)
    if url.scheme not in ("", "file"):
        return True
    return Path(unquote(url.path) if url.scheme else location).expanduser().exists()
