"""The event log of an endpoint: a ring that forgets its oldest records, in number and in bytes.

Records of one kind that follow each other closely (the chunks of a transfer) are one record with a count, so that a
large transfer doesn't push the others out. Nothing here locks: the endpoint does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.observe.records import Record, Value

MAX_RECORDS = 16_384
MAX_BYTES = 8 << 20
TEXT_LIMIT = 400
"""Characters of one value."""
MERGE_S = 0.05
_RECORD_BYTES = 320  # an entry without its texts, roughly


@dataclass
class _Entry:
    number: int
    mono_s: float
    wall_s: float
    event: str
    transfer: str
    role: str
    peer: str
    phase: str
    bytes: int
    count: int
    last_s: float
    values: dict[str, Value]
    size: int


class EventLog:
    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._ring: deque[_Entry] = deque()
        self._size = 0
        self._number = 0
        self._open: dict[str, dict[tuple[str, str], _Entry]] = {}  # by transfer and (event, peer): records that merge

    @property
    def lost(self) -> int:
        return self._number - len(self._ring)

    def add(
        self,
        now: float,
        event: str,
        transfer: str = "",
        role: str = "",
        peer: str = "",
        phase: str = "",
        nbytes: int = 0,
        values: Mapping[str, Value] | None = None,
    ) -> None:
        kept = {key: value[:TEXT_LIMIT] if isinstance(value, str) else value for key, value in (values or {}).items()}
        size = _RECORD_BYTES + len(transfer) + sum(len(key) + len(str(value)) for key, value in kept.items())
        wall_s = time.time()
        self._push(_Entry(self._number, now, wall_s, event, transfer, role, peer, phase, nbytes, 1, now, kept, size))

    def merge(
        self, now: float, event: str, transfer: str, role: str, peer: str, phase: str, nbytes: int, count: int = 1
    ) -> None:
        """As `add`, but into the last record of this kind where that began less than `MERGE_S` ago."""
        open_ones = self._open.setdefault(transfer, {})
        entry = open_ones.get((event, peer))
        if entry is not None and now - entry.mono_s < MERGE_S and entry.phase == phase:
            entry.bytes += nbytes
            entry.count += count
            entry.last_s = now
            return
        size = _RECORD_BYTES + len(transfer)
        wall_s = time.time()
        entry = _Entry(self._number, now, wall_s, event, transfer, role, peer, phase, nbytes, count, now, {}, size)
        open_ones[event, peer] = entry
        self._push(entry)

    def forget(self, transfer: str) -> None:
        """The transfer has ended: nothing is added to its records any more."""
        self._open.pop(transfer, None)

    def entries(self) -> list[_Entry]:
        return list(self._ring)

    def _push(self, entry: _Entry) -> None:
        self._number += 1
        self._ring.append(entry)
        self._size += entry.size
        while len(self._ring) > self._max_records or self._size > self._max_bytes:
            self._size -= self._ring.popleft().size


def as_records(entries: list[_Entry]) -> tuple[Record, ...]:
    return tuple(
        Record(
            e.number,
            e.mono_s,
            e.wall_s,
            e.event,
            e.transfer,
            e.role,
            e.peer,
            e.phase,
            e.bytes,
            e.count,
            e.last_s,
            e.values,
        )
        for e in entries
    )
