"""The wire: version first, everything typed, everything bounded."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import DocumentError
from kvferry.layout.address import Address
from kvferry.layout.request import Wanted
from kvferry.plan.dense import Chunk
from kvferry.plan.route import Box
from kvferry.session import messages as m
from tests.session.pools import HIGH_BASE, Shape, WorkerPool, instance

ME, YOU = m.Peer("decode 0", 17, 3), m.Peer("prefill", 2**62, 0)
BOX = Box("attn", (0, 5), ("k", "v"), {"head": ((0, 2), (4, 6)), "dim": ((0, 64),)}, ((1, 2, 16),))
CARD = m.Card(
    "tcp://127.0.0.1:1",
    1,
    instance("prefill", Shape(base=HIGH_BASE), (WorkerPool(Shape(base=HIGH_BASE), 0).worker(),)),
    b"\xff\0",
    m.Process(1, 2, "pid:[1]"),
)
BODIES: list[m.Message] = [
    m.Hello(CARD),
    m.Welcome(CARD),
    m.Goodbye(),
    m.Offer("a", 1, {"attn": Wanted((0, 5))}, (m.Piece(Chunk(BOX, (0, 5)), 9),), (0, 1), 1.5),
    m.Ready("a", 1, (m.Part({"attn": Wanted((0, 4))}, (0, 2)),), False),
    m.Grants("a", 1, (m.Grant(0, b"g" * 16, Address(2**64 - 1), 9),)),
    m.ChunkDone("a", 1, 0, b"g" * 16, 9),
    m.Landed("a", 1),
    m.Commit("a", 1),
    m.Complete("a", 1),
    m.Abort("a", 1, "source", "timeout", "why"),
    m.AbortAck("a", 1),
    m.Beat(True),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_round_trip(body: m.Message) -> None:
    data = m.encode(ME, YOU, body)
    assert m.decode(data) == m.Envelope(m.PROTOCOL, ME, YOU, body)


def test_version_comes_first_and_is_judged_first() -> None:
    raw = msgspec.msgpack.decode(m.encode(ME, YOU, BODIES[4]))
    assert raw[0] == m.PROTOCOL
    later = m.PROTOCOL + 1
    with pytest.raises(DocumentError, match=f"peer speaks protocol {later}, this side {m.PROTOCOL}"):
        m.decode(msgspec.msgpack.encode([later, "of another shape", {"new": "fields"}]))


def changed(index: int, **fields: object) -> bytes:
    raw = msgspec.msgpack.decode(m.encode(ME, YOU, BODIES[index]))
    raw[3].update(fields)
    return msgspec.msgpack.encode(raw)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        pickle.dumps({"a": 1}),
        changed(4, extra=1),
        changed(4, transfer=""),
        changed(4, transfer="x" * 257),
        changed(4, attempt=-1),
        changed(4, type="eval"),
        changed(6, grant=b"g" * 15),
        changed(6, bytes=-1),
        changed(6, piece=2**63),
        changed(6, bytes=1.5),
        changed(10, role="boss"),
        changed(10, reason="x" * 4097),
        changed(3, timeout_s=float("nan")),
        changed(3, timeout_s=-1.0),
    ],
)
def test_f65_junk_is_refused_as_a_whole(data: bytes) -> None:
    with pytest.raises(DocumentError):
        m.decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_the_one_error(data: bytes) -> None:
    try:
        m.decode(data)
    except DocumentError:
        pass


@given(st.integers(0, 10**9), st.binary(min_size=1, max_size=4))
def test_damaged_messages_decode_or_raise_the_one_error(at: int, junk: bytes) -> None:
    data = bytearray(m.encode(ME, YOU, BODIES[3]))
    at %= len(data)
    data[at : at + len(junk)] = junk
    try:
        m.decode(bytes(data))
    except DocumentError:
        pass


def test_size_is_bounded_both_ways() -> None:
    pieces = tuple(m.Piece(Chunk(BOX, (0, 5)), 9) for _ in range(200_000))
    with pytest.raises(DocumentError, match="at most 16777216 may be sent"):
        m.encode(ME, YOU, m.Offer("a", 1, {}, pieces, (0,), 1.0))
    with pytest.raises(DocumentError, match="at most 16777216 are accepted"):
        m.decode(bytes(m.MAX_MESSAGE_BYTES + 1))
