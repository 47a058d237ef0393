"""The kvferry-trace/1 format: JSON lines, by which an endpoint tells what it has done and what it waits for.

The first line is the `Head`. `State` lines follow, one per transfer that runs, `Sample` lines with its numbers, and
`Record` lines, its event log, oldest first. No grant, key or byte of a cache is in any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Union

import msgspec

from kvferry.errors import DocumentError
from kvferry.layout.document import Struct, decode_json, encode_json

Value = Union[int, float, str]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0)]
MAX_LINES = 1_000_000


class Head(Struct, frozen=True, tag="head", tag_field="type"):
    """Whose log this is, and both clocks at the moment of writing.

    `mono_s` is CLOCK_MONOTONIC, which all processes of one `boot` share; `wall_s` is Unix time. `lost`: records that
    are no longer in the log. `file`: why this was written to a file; empty when a live endpoint was asked.
    """

    format: Literal["kvferry-trace/1"]
    instance: Text
    generation: Count
    rank: Count
    pid: Count
    host: Text
    boot: Text
    version: Text
    mono_s: float
    wall_s: float
    lost: Count = 0
    file: Text = ""

    @property
    def worker(self) -> str:
        return f"{self.instance}/{self.generation}/{self.rank}"


class Flow(Struct, frozen=True):
    """What travels between a worker and one peer in one transfer. `granted_bytes`: under way, by living grants."""

    peer: Text
    expected_bytes: Count = 0
    moved_bytes: Count = 0
    granted_bytes: Count = 0
    pieces: Count = 0
    moved_pieces: Count = 0


class Wait(Struct, frozen=True):
    """`what` a transfer waits for, for how long without progress, and when `peer` was last heard; peer may be empty."""

    what: Text
    since_s: float
    peer: Text = ""
    quiet_s: Union[float, None] = None


class State(Struct, frozen=True, tag="state", tag_field="type"):
    """One running transfer. `request`: the engine's own name of it, where that isn't the transfer id."""

    transfer: Text
    role: Literal["source", "target"]
    phase: Text
    age_s: float
    left_s: float
    request: Text = ""
    flows: tuple[Flow, ...] = ()
    waits: tuple[Wait, ...] = ()


class Sample(Struct, frozen=True, tag="sample", tag_field="type"):
    """One number: a counter's or gauge's `value`, or a histogram's `buckets` and `value`, their sum."""

    name: Text
    labels: tuple[Text, ...]
    value: float
    buckets: tuple[Count, ...] = ()


class Record(Struct, frozen=True, tag="event", tag_field="type"):
    """Something happened. `count` times, the last at `last_s`, where many of a kind follow each other closely.

    `number` counts the records of an endpoint. `phase` is the transfer's after the event.
    """

    number: Count
    mono_s: float
    wall_s: float
    event: Text
    transfer: Text = ""
    role: Text = ""
    peer: Text = ""
    phase: Text = ""
    bytes: Count = 0
    count: Count = 1
    last_s: float = 0.0
    values: dict[str, Value] = {}  # noqa: RUF012  (msgspec copies defaults)


Line = Union[Head, State, Sample, Record]


class Log(Struct, frozen=True):
    """All that one endpoint says of itself."""

    head: Head
    states: tuple[State, ...] = ()
    samples: tuple[Sample, ...] = ()
    records: tuple[Record, ...] = ()

    def lines(self) -> Iterable[Line]:
        return (self.head, *self.states, *self.samples, *self.records)


def encode_log(log: Log) -> bytes:
    return b"".join(encode_json(line) + b"\n" for line in log.lines())


def decode_log(data: bytes, name: str) -> Log:
    """DocumentError, with `name` and the number of the line, for what is no log. A last line that was cut off, as of an
    endpoint that died while it wrote, is left out.
    """
    lines = data.split(b"\n")
    lines.pop()  # empty, or cut off
    if not lines or len(lines) > MAX_LINES:
        raise DocumentError(name, f"expected kvferry-trace/1, 1 … {MAX_LINES} lines of JSON, got {len(lines)}")
    found: list[Line] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(decode_json(line, Line))  # type: ignore[arg-type]  # a union is no type to mypy
        except DocumentError as error:
            where = f"{name}: line {number}"
            raise DocumentError(f"{where}: {error.path}" if error.path else where, error.problem) from None
    head = found[0]
    if not isinstance(head, Head):
        raise DocumentError(f"{name}: line 1", "expected the head of a kvferry-trace/1 log")
    states = tuple(line for line in found if isinstance(line, State))
    samples = tuple(line for line in found if isinstance(line, Sample))
    records = tuple(line for line in found if isinstance(line, Record))
    return Log(head, states, samples, records)


def short(peer: str) -> str:
    """`instance/generation/rank` without the generation, as people read it."""
    parts = peer.rsplit("/", 2)
    return f"{parts[0]}/{parts[2]}" if len(parts) == 3 else peer
