"""One SGLang server: its name, its description of itself, its answer to a prompt."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt

_INFO = ("/server_info", "/get_server_info")  # SGLang's new name, and its old one
_INFO_SECONDS = 30
_ANSWER_SECONDS = 3600  # a long prompt waits until earlier prompts are done


class ServerError(RuntimeError):
    """A server is gone, or refused a prompt. The message is one sentence that names the server."""


@dataclass(frozen=True)
class Reply:
    text: str | None  # None from a server without a tokenizer
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Server:
    name: str
    url: str  # without a path

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.name not in self.url else self.url

    def info(self) -> dict[str, Any]:
        """Return the server's description of itself; empty if another program answers for the server.

        Raise ServerError if there is no answer.
        """
        for path in _INFO:
            try:
                found: dict[str, Any] = json.loads(self._open(path, None, _INFO_SECONDS))
                return found
            except urllib.error.HTTPError:
                continue
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServerError(f"{self} cannot be asked: {_reason(error)}") from error
        return {}

    def answer(self, prompt: RetrievalPrompt) -> Reply:
        """Return the greedy answer, up to the token that ends it. Raise ServerError for a refusal or a lost server."""
        greedy = {"temperature": 0, "max_new_tokens": prompt.new_tokens, "ignore_eos": False}
        body = json.dumps({"input_ids": prompt.ids, "sampling_params": greedy}).encode()
        try:
            said = json.loads(self._open("/generate", body, _ANSWER_SECONDS))
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"{self} refused a prompt of {len(prompt.ids)} tokens with status {error.code}: {_message(error)}"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"{self} is gone: {_reason(error)}") from error
        text, ids = said.get("text"), said.get("output_ids")
        if text is None and ids is None:
            raise ServerError(f"{self} answered without text and without tokens: {str(said)[:200]}")
        return Reply(text, tuple(ids or ()))

    def _open(self, path: str, body: bytes | None, seconds: float) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            read: bytes = reply.read()
        return read


def servers_of(urls: Sequence[str], stock: str | None) -> list[Server]:
    """Return a server for each ``[NAME=]URL``, ``stock`` first. Raise InputError if two servers have the same name."""
    servers = [_server(f"stock={stock}")] if stock else []
    servers += map(_server, urls)
    names = [server.name for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two servers are named {name}: name each, as in --url small=http://127.0.0.1:30000")
    return servers


def _server(text: str) -> Server:
    name, equals, url = text.partition("=")
    if not equals or "/" in name:  # the "=" is a part of the address
        name, url = "", text
    scheme, separator, rest = url.rstrip("/").partition("://")
    if scheme not in ("http", "https") or not separator or not rest:
        raise InputError(f"--url {url}: an address such as http://127.0.0.1:30000 is needed")
    return Server(name or rest, f"{scheme}://{rest}")


def _message(error: urllib.error.HTTPError) -> str:
    """Return SGLang's error message from the JSON of its reply, at most 300 characters."""
    try:
        said = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return error.reason
    try:
        found = json.loads(said)
        told = found.get("error", found.get("message", found)) if isinstance(found, dict) else found
        told = told.get("message", told) if isinstance(told, dict) else told
    except ValueError:
        told = said
    return " ".join(str(told).split())[:300] or error.reason


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return " ".join(str(reason).split()) or type(error).__name__
