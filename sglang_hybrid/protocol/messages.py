"""Messages of the control plane: requests of a scheduler process to its worker, and the worker's answers.

Each request gets one answer. Both are msgpack with a type tag and the protocol's version. A request that is malformed,
out of range or not possible now is answered with ``Failed`` and changes nothing. The only exception is a plan whose
threads cannot be started: the threads of the plan before have ended by then.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

PROTOCOL = 2
MAX_MESSAGE_BYTES = 64 << 10
MAX_THREADS = 1024
SPIN_US = 200  # microseconds that threads stay awake after the last work; then they sleep until they are woken
CLIENT_ID_BYTES = 17  # length of the prefix of a ZMQ routing id that identifies the client

_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Provider = Literal["native", "torch", "ipex"]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    protocol: Annotated[int, Meta(ge=0, lt=1 << 31)] = PROTOCOL


# -- requests ----------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """Ask for the worker's identity and versions. A worker of another protocol version answers only this request."""


class Attach(_Message, frozen=True, tag="attach"):
    """Map and check the two regions whose descriptors came over the descriptor socket with this token."""

    token: Token


class ThreadPlan(_Message, frozen=True, tag="plan"):
    """Start computing for the attached regions with these threads. Threads of an earlier plan are stopped first."""

    provider: Provider = "native"
    threads: Annotated[int, Meta(ge=0, le=MAX_THREADS)] = 0  # 0: the worker chooses
    group_threads: Annotated[int, Meta(ge=0, le=MAX_THREADS)] = 0  # 0: the worker chooses
    task_blocks: Annotated[int, Meta(ge=1, le=4096)] = 8  # blocks that a thread takes at a time: unit of balancing
    spin_us: Annotated[int, Meta(ge=0, le=10_000_000)] = SPIN_US  # see SPIN_US
    cores: Annotated[str, Meta(max_length=1024)] = "auto"  # "auto", "none" or a list such as "0-7,16"
    near: Annotated[int, Meta(ge=-1, le=1 << 16)] = -1  # NUMA node whose cores "auto" takes first; -1: none


class WarmUp(_Message, frozen=True, tag="warm-up"):
    """Map the regions' pages, or start to, and run the kernel once, so that the first token does not wait for this."""


class Health(_Message, frozen=True, tag="health"):
    pass


class Stats(_Message, frozen=True, tag="stats"):
    pass


class Drain(_Message, frozen=True, tag="drain"):
    """Answer the current posts, then stop computing and unmap the regions. The process stays."""


class Stop(_Message, frozen=True, tag="stop"):
    """Drain, then end the process."""


# -- answers -----------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    version: _Text  # version of the package
    pid: _Count
    mailbox_version: _Count
    variants: list[_Text]  # variants of the native kernel, fastest first
    attached: bool  # whether the regions of a client are attached


class Done(_Message, frozen=True, tag="done"):
    pass


class Planned(_Message, frozen=True, tag="planned"):
    """Provider, threads and cores that the worker has chosen for a plan."""

    provider: Provider
    variant: _Text  # variant of the native kernel for this dtype and head_dim; for other providers their name
    threads: _Count
    group_threads: _Count
    cores: list[int]  # core of each thread; empty if threads are not bound
    taken: list[int] = []  # CPUs that other workers were bound to


class HealthReport(_Message, frozen=True, tag="health-report"):
    state: Literal["idle", "attached", "serving"]
    uptime_s: float
    completed: _Count  # number of the newest post that was answered or given up


class StatsReport(_Message, frozen=True, tag="stats-report"):
    """Counters since the plan was made, see sh_engine_stats in c_api.h."""

    posts: _Count
    rows: _Count
    refused_rows: _Count
    abandoned_posts: _Count
    blocks: _Count
    tasks: _Count
    stolen_tasks: _Count
    busy_ns: _Count
    parks: _Count


class Failed(_Message, frozen=True, tag="failed"):
    reason: _Text


Request: TypeAlias = Hello | Attach | ThreadPlan | WarmUp | Health | Stats | Drain | Stop
Answer: TypeAlias = Welcome | Done | Planned | HealthReport | StatsReport | Failed

_M = TypeVar("_M", bound=_Message)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class ProtocolError(ValueError):
    """Received bytes are not a message of this protocol. The error's message says why."""


def encode(message: Request | Answer) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a request. Raise ProtocolError for other bytes or versions; a ``Hello`` may have any version."""
    return _decode(_requests, data)


def decode_answer(data: bytes) -> Answer:
    """Decode an answer. Raise ProtocolError for other bytes or versions.

    A ``Welcome`` may have any version, so that the caller can compare versions.
    """
    return _decode(_answers, data)


def _decode(decoder: msgspec.msgpack.Decoder[_M], data: bytes) -> _M:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None
    if message.protocol != PROTOCOL and not isinstance(message, Hello | Welcome):
        raise ProtocolError(f"protocol {message.protocol}, this side speaks {PROTOCOL}")
    return message
