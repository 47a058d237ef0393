"""What decode and prefill tell each other about rooms, and the backend's settings. No SGLang needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvferry.engines.sglang import control
from kvferry.engines.sglang.control import Ask, Attempts, Cancel, Rooms, decode, encode
from kvferry.engines.sglang.options import Options
from kvferry.errors import DocumentError, EngineError, KVFerryError


@pytest.mark.parametrize("word", [Ask(0, "a"), Ask((1 << 64) - 1, "a" * 256), Cancel(-5, "a", "why")])
def test_words_come_back(word: control.Word) -> None:
    assert decode([encode(word)]) == word


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [encode(Ask(1, "a")), b""],
        [encode(Ask(1, "a")) + b"\0"],
        [encode(Ask(1, ""))],
        [encode(Ask(1, "a" * 257))],
        [encode(Cancel(1, "a", "x" * 2000))],
        [b"\0" * 5000],
        [msgspec.msgpack.encode({"type": "ask", "room": "1", "transfer": "a"})],
        [msgspec.msgpack.encode({"type": "ask", "room": 1, "transfer": "a", "more": 1})],
        [msgspec.msgpack.encode({"type": "stop", "room": 1})],
    ],
)
def test_junk_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(DocumentError):
        decode(frames)


def test_a_cancel_says_nothing_about_another_attempt() -> None:
    """F53: a room keeps nothing of the request that had it before."""
    rooms = Rooms()
    rooms.hear(Ask(7, "first"))
    rooms.hear(Ask(7, "second"))
    rooms.hear(Cancel(7, "first", "late"))
    assert rooms.last(7) == Ask(7, "second")
    rooms.hear(Cancel(7, "second", "now"))
    assert rooms.last(7) == Cancel(7, "second", "now")
    rooms.hear(Ask(7, "third"))
    assert rooms.last(7) == Ask(7, "third")
    rooms.forget(7)
    assert rooms.last(7) is None


def test_rooms_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_ROOMS", 3)
    now = 100.0
    monkeypatch.setattr(control.time, "monotonic", lambda: now)
    rooms = Rooms()
    for room in range(5):
        rooms.hear(Ask(room, "a"))
    assert [room for room in range(5) if rooms.last(room)] == [2, 3, 4]
    now += control.KEEP_S + 1
    assert rooms.last(4) is None
    rooms.hear(Ask(9, "a"))
    assert len(rooms._heard) == 1


def test_attempts_are_numbered_by_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_ROOMS", 2)
    attempts = Attempts()
    assert [attempts.next("a", 1), attempts.next("a", 1), attempts.next("b", 1), attempts.next("a", 1)] == [0, 1, 0, 2]
    attempts.next("a", 2)
    assert len(attempts._seen) == 2


def test_settings() -> None:
    assert Options.read({}) == Options()
    environment = {
        "KVFERRY_TRANSPORT": "tcp",
        "KVFERRY_SLOTS": "3",
        "KVFERRY_SLOT_BYTES": "65536",
        "KVFERRY_REGISTRY": "http://127.0.0.1:7000",
        "KVFERRY_DUMP": "/tmp/dumps",
    }
    assert Options.read(environment) == Options("tcp", 3, 65536, "http://127.0.0.1:7000", Path("/tmp/dumps"))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("KVFERRY_TRANSPORT", "pigeon", EngineError),
        ("KVFERRY_SLOTS", "0", EngineError),
        ("KVFERRY_SLOTS", "many", EngineError),
        ("KVFERRY_SLOT_BYTES", "-1", EngineError),
        ("KVFERRY_REGISTRY", "127.0.0.1:7000", KVFerryError),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(name: str, value: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=value):
        Options.read({name: value})
