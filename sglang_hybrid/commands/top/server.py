"""HTTP client of the watched server: /metrics, /server_info, and the reason if there is nothing to show."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from sglang_hybrid.commands.top.reading import Reading, parse

MAX_BYTES = 32 << 20  # maximum size of one answer
METRICS_SECONDS = 5.0
INFO_SECONDS = 30.0  # the scheduler answers between two chunks of a prompt, which take long on a CPU


class Kind(StrEnum):
    """Reason why a server cannot be watched, or not fully."""

    NO_ANSWER = "no-answer"
    NO_METRICS = "no-metrics"
    NOT_SGLANG = "not-sglang"
    STOCK = "stock"


class Unwatchable(Exception):
    """A server cannot be watched. The text tells the person who watches what is wrong and what to do."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class BadUrl(ValueError):
    """The text is not the URL of a server. The message shows what such a URL looks like."""


@dataclass(frozen=True)
class Server:
    """The watched server. ``url`` has no slash at its end; ``api_key`` is for a server that requires a key."""

    url: str
    api_key: str | None = None

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Server:
        """Return the server at ``url``, which may lack ``http://``. Raise BadUrl if ``url`` is not one of a server."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise BadUrl(f"--url {url} is no address of a server: it looks like http://127.0.0.1:30000")
        return cls(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", api_key)

    def read(self) -> Reading:
        """Take one reading of /metrics. Raise Unwatchable if there is no answer, or none that SGLang would give."""
        try:
            text = self._get("/metrics", METRICS_SECONDS).decode()
            reading = parse(text, time.monotonic(), time.time())
        except urllib.error.HTTPError as error:
            raise self._without_metrics(error.code) from error
        except ValueError as error:  # neither text nor Prometheus' format
            raise _not_sglang(self.url, "its /metrics is not in Prometheus' text format") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unwatchable(
                Kind.NO_ANSWER,
                f"no server answers at {self.url} ({_reason(error)}). Start one with sglang-hybrid serve "
                "--enable-metrics, or name another with --url.",
            ) from error
        # a server that has just started may have counted nothing yet
        if not reading.is_sglang and not self._is_sglang():
            raise _not_sglang(self.url, "none of its metrics is SGLang's")
        return reading

    def info(self) -> Mapping[str, Any] | None:
        """Return what the server reports about itself, or None if it refuses, for example without its key."""
        for path in ("/server_info", "/get_server_info"):  # newer name first: newer servers warn about the older one
            try:
                found = json.loads(self._get(path, INFO_SECONDS))
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    continue
                return None
            except (OSError, http.client.HTTPException, ValueError):
                return None
            return found if isinstance(found, dict) else None
        return None

    def _without_metrics(self, status: int) -> Unwatchable:
        if status == 404 and self._is_sglang():
            return Unwatchable(
                Kind.NO_METRICS,
                f"the server at {self.url} was started without metrics. Start it with --enable-metrics.",
            )
        return _not_sglang(self.url, f"its /metrics answers with status {status}")

    def _is_sglang(self) -> bool:
        """Return True if the list of models names SGLang or requires a key. The list does not need the scheduler."""
        try:
            models = json.loads(self._get("/v1/models", METRICS_SECONDS))
            return any(model.get("owned_by") == "sglang" for model in models["data"])
        except urllib.error.HTTPError as error:
            return error.code == 401  # the server requires a key
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
            return False

    def _get(self, path: str, seconds: float) -> bytes:
        request = urllib.request.Request(self.url + path)
        if self.api_key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        with _OPENER.open(request, timeout=seconds) as answer:
            body: bytes = answer.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            raise ValueError(f"{path} has more than {MAX_BYTES} bytes")
        return body


# ignores proxies of the environment: they serve outgoing requests and would get requests for 127.0.0.1 too
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _not_sglang(url: str, why: str) -> Unwatchable:
    return Unwatchable(
        Kind.NOT_SGLANG,
        f"what answers at {url} is no SGLang server: {why}. Name a server with --url; behind a router, "
        "name one of its servers.",
    )


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)  # what urllib wraps
    if isinstance(reason, TimeoutError):
        return f"nothing within {METRICS_SECONDS:g} s"
    text = reason.strerror if isinstance(reason, OSError) else None
    return (text or str(reason) or type(reason).__name__).lower()
