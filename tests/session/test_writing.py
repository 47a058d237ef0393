"""Two transfers write to one peer over one link: what befalls one of them is not the other's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvferry.errors import KVFerryError, TransportError
from kvferry.layout.document import Instance
from kvferry.layout.request import Side, Table
from kvferry.plan.dense import Chunk, DenseCopies, chunk_bytes, dense_copies
from kvferry.plan.route import Box
from kvferry.session.events import Write, WriteFailed, Written
from kvferry.session.messages import Peer
from kvferry.session.writing import Writer
from kvferry.transport.base import open_transport
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import HostMemory, window
from kvferry.transport.staging import Staging
from tests.plan.build import instance

WAYS = ("shm", "process_vm", "tcp")
PEER = Peer("d", 1, 0)
SOURCE = instance()
CHUNK = Chunk(Box("attn", (0,), ("k",), {"head": ((0, 4),), "dim": ((0, 4),)}), (0, 16))
NBYTES = chunk_bytes(SOURCE.groups[0], CHUNK)


class Pages(HostMemory):
    """`before` runs, once, when a chunk is about to be gathered."""

    def __init__(self, document: Instance) -> None:
        region = document.workers[0].regions[0]
        super().__init__([window(region.base, np.arange(region.bytes, dtype=np.uint64).astype(np.uint8))])
        self.before: Callable[[], None] | None = None

    def gather(self, copies: DenseCopies, out: Bytes) -> None:
        super().gather(copies, out)
        before, self.before = self.before, None
        if before is not None:
            before()


class Target:
    """A peer's landing slots and the writer that reaches them, in one process."""

    def __init__(self, way: str) -> None:
        self.staging, own = Staging(4, 1 << 16), Staging(1, 1 << 12)
        self.transport, self._source = open_transport(way, self.staging), open_transport(way, own)
        self.pages, self.ends = Pages(SOURCE), dict[str, Any]()
        self.writer = Writer(
            PEER, self._source, SOURCE, SOURCE.workers[0], self.pages, lambda *_: True, self._answer
        )  # fmt: skip
        self._all = (self.transport, self._source, self.staging, own)

    def job(self, transfer: str, slot: int, allowed: bool = True) -> Write:
        grant = transfer.encode().ljust(16, b"-")
        if allowed:
            self.transport.grant(grant, slot, NBYTES)
        side, at = Side({"attn": Table((0, 1))}), self.staging.layout.address(slot)
        return Write(transfer, PEER, self.transport.export(), 0, CHUNK, grant, at, NBYTES, side, 20.0)

    def put(self, job: Write) -> threading.Event:
        self.ends[job.transfer] = done = threading.Event()
        self.writer.put(job, threading.Event())
        return done

    def _answer(self, work: Callable[[], Written], failed: Callable[[KVFerryError], WriteFailed]) -> None:
        event: Written | WriteFailed
        try:
            event = work()
        except KVFerryError as error:
            event = failed(error)
        done, self.ends[event.transfer] = self.ends[event.transfer], event
        done.set()

    def close(self) -> None:
        self.writer.close(5.0)
        for one in self._all:
            one.close()


@contextmanager
def target(way: str) -> Iterator[Target]:
    one = Target(way)
    try:
        yield one
    finally:
        one.close()


def test_a_refused_write_breaks_no_other_transfers_write() -> None:
    """Over tcp a refusal ends the connection, on which the next write waits already."""
    with target("tcp") as there:
        assert there.put(there.job("first", 0)).wait(20)

        def refused() -> None:
            link = there.writer.link
            assert link is not None
            with pytest.raises(TransportError, match="unknown or revoked grant"):
                link.write(there.staging.layout.address(1), b"nobody's", 8, lambda data: data.fill(0), 5.0)

        there.pages.before = refused
        assert there.put(there.job("second", 2)).wait(20)
        assert isinstance(there.ends["second"], Written), there.ends["second"]
        want = np.empty(NBYTES, np.uint8)
        there.pages.gather(_copies(), want)
        assert np.array_equal(there.staging.view(2)[:NBYTES], want)


@pytest.mark.parametrize("way", WAYS)
def test_a_link_is_not_closed_under_another_write(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails makes its link be forgotten, while another one is in the middle of gathering for it."""
    monkeypatch.setattr("kvferry.session.writing.GATHERING", threading.Semaphore(2))  # as on four cores
    with target(way) as there:
        failed = threading.Event()

        def meanwhile() -> None:
            wrong = there.job("wrong", 3)
            too_far = there.staging.layout.address(3).plus(1 << 16)
            assert there.put(Write(**{**vars(wrong), "address": too_far})).wait(20)
            failed.set()

        there.pages.before = meanwhile
        assert there.put(there.job("right", 1)).wait(20)
        assert failed.is_set() and isinstance(there.ends["wrong"], WriteFailed)
        assert isinstance(there.ends["right"], Written), there.ends["right"]
        assert there.put(there.job("next", 2)).wait(20)
        assert isinstance(there.ends["next"], Written), there.ends["next"]


def _copies() -> DenseCopies:
    return dense_copies(SOURCE.workers[0], SOURCE.groups[0], CHUNK, Side({"attn": Table((0, 1))}))
