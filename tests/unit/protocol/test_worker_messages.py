"""Control messages arrive as they were sent, and anything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Answer,
    Attach,
    Done,
    Drain,
    Failed,
    Health,
    HealthReport,
    Hello,
    Planned,
    ProtocolError,
    Request,
    Stats,
    StatsReport,
    Stop,
    ThreadPlan,
    WarmUp,
    Welcome,
    decode_answer,
    decode_request,
    encode,
)

TOKEN = "0123456789abcdef" * 2
LARGEST = (1 << 63) - 1

REQUESTS: list[Request] = [
    Hello(), Attach(token=TOKEN), ThreadPlan(), WarmUp(), Health(), Stats(), Drain(), Stop(),
    ThreadPlan(provider="torch", threads=7, group_threads=2, task_blocks=16, spin_us=0, cores="0-3,9"),
]  # fmt: skip
ANSWERS: list[Answer] = [
    Welcome(version="1", pid=1, mailbox_version=1, variants=["avx2", "portable"], attached=True),
    Done(),
    Planned(provider="native", variant="amx", threads=2, group_threads=1, cores=[3, 4]),
    HealthReport(state="serving", uptime_s=1.5, completed=LARGEST),
    StatsReport(
        posts=1, rows=2, refused_rows=3, abandoned_posts=4, blocks=5, tasks=6, stolen_tasks=7, busy_ns=LARGEST, parks=8
    ),
    Failed(reason="because"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_arrives_as_it_was_sent(request_: Request) -> None:
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda message: type(message).__name__)
def test_an_answer_arrives_as_it_was_sent(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer


@given(st.binary(max_size=200))
def test_garbage_is_refused_as_such_and_with_no_other_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(data)


@given(st.sampled_from(REQUESTS), st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_request_is_refused_or_still_a_request_in_range(request_: Request, place: int, byte: int) -> None:
    data = bytearray(encode(request_))
    data[place % len(data)] = byte
    try:
        decoded = decode_request(bytes(data))
    except ProtocolError:
        return
    if isinstance(decoded, ThreadPlan):
        assert decoded.task_blocks >= 1


@given(st.sampled_from(REQUESTS), st.data())
def test_a_request_that_was_cut_short_is_refused(request_: Request, data: st.DataObject) -> None:
    whole = encode(request_)
    with pytest.raises(ProtocolError):
        decode_request(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "attach", "token": TOKEN[:-1]},
        {"type": "attach", "token": TOKEN.upper()},
        {"type": "attach", "token": TOKEN + "\n"},
        {"type": "attach", "token": 7},
        {"type": "attach"},
        {"type": "plan", "provider": "cuda"},
        {"type": "plan", "threads": -1},
        {"type": "plan", "threads": 1 << 40},
        {"type": "plan", "threads": True},
        {"type": "plan", "threads": 1.5},
        {"type": "plan", "task_blocks": 0},
        {"type": "plan", "cores": "0," * 1000},
        {"type": "plan", "anything": 1},
        {"type": "welcome"},
        {"type": "nothing"},
        {},
        {"type": "hello", "protocol": -1},
    ],
    ids=str,
)
def test_requests_with_fields_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode_request(msgspec.msgpack.encode(fields))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_request(b"\x91" * (MAX_MESSAGE_BYTES - 1))


def test_a_message_that_is_too_long_is_refused_with_its_size() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        decode_request(b"\0" * (MAX_MESSAGE_BYTES + 1))


def test_another_protocol_is_refused_unless_it_only_says_hello() -> None:
    assert decode_request(encode(Hello(protocol=PROTOCOL + 1))).protocol == PROTOCOL + 1
    with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL + 1}, this side speaks {PROTOCOL}"):
        decode_request(encode(Stop(protocol=PROTOCOL + 1)))
    with pytest.raises(ProtocolError):
        decode_answer(encode(Done(protocol=PROTOCOL + 1)))
