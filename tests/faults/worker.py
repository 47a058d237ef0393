"""A worker process that can be held in a phase of a transfer, and knows what every byte of its memory must be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import kvferry.session.endpoint
from kvferry.errors import (
    PeerLost,
    RegistryError,
    TransferAborted,
    TransferCorrupted,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvferry.session.lines import Lines
from tests.session.crew import Worker
from tests.session.pools import Shape, WorkerPool

HOLD_S = 40.0
"""Nothing is held longer, so that no thread of a failed test stays."""
ENDS: dict[type[TransferError], str] = {
    TransferTimeout: "timeout",
    TransferAborted: "aborted",
    TransferRefused: "refused",
    PeerLost: "lost",
    TransferCorrupted: "corrupted",
}


class FaultWorker(Worker):
    def open_behind(self, proxy_port: int, name: str, shape: Shape, rank: int, registry: str, **options: Any) -> int:
        """As `open`, but peers are told the proxy's address; returns the port of the control socket itself."""
        with _advertised(f"tcp://127.0.0.1:{proxy_port}") as real:
            self.open(name, shape, rank, registry, **options)
        self.twin = WorkerPool(shape, rank)
        self._install_holds()
        return int(real[0].rpartition(":")[2])

    def registered(self) -> bool:
        """Whether the registry lists this start: an endpoint that is there has not yet told it."""
        me = self._endpoint._me
        try:
            found = self._endpoint._rendezvous._registry.instance(me.instance)
        except RegistryError:
            return False
        return any((entry.rank, entry.generation) == (me.rank, me.generation) for entry in found.workers)

    # what is in memory

    def own(self, pages: list[int], start: int, tokens: tuple[int, int]) -> None:
        """These pages now belong to somebody else, who writes into them."""
        self.pool.fill(pages, start, tokens)
        self.twin.fill(pages, start, tokens)

    def arrived(self, pages: list[int], start: int, tokens: tuple[int, int]) -> None:
        """These tokens must lie in these pages, by a transfer."""
        self.twin.fill(pages, start, tokens)

    def wrong_bytes(self) -> int:
        """Of the whole memory, pages of nobody included."""
        return int(np.count_nonzero(self.pool.bytes_view != self.twin.bytes_view))

    # how transfers are

    def phase(self, transfer: str) -> str:
        """Of the running transfer, as the machine says; empty where there is none."""
        machine = self._endpoint._machine
        running = machine.targets.running.get(transfer) or machine.sources.running.get(transfer)
        return running.phase if running else ""

    def takers(self, transfer: str) -> int:
        running = self._endpoint._machine.sources.running.get(transfer)
        return len(running.takers) if running else 0

    def end(self, transfer: str) -> tuple[str, str, float]:
        """How it ended, what its error says, and how long after the call."""
        try:
            report = self._endpoint.wait(self.transfers[transfer])
        except TransferError as error:
            return ENDS[type(error)], str(error), error.where.elapsed_s
        return "done", "", report.seconds

    def pages_held(self) -> int:
        """Transfers that keep pages: running ones, and failed ones that somebody may still write to."""
        stats = self._endpoint.stats()
        held = sum(not transfer.pages_free for transfer in self.transfers.values())
        return held + stats["offers_waiting"]

    def slots_held(self) -> int:
        stats = self._endpoint.stats()
        return stats["slots_used"] + stats["slots_quarantined"] + stats["pieces_quarantined"]

    # holding

    def hold(self, where: str) -> None:
        """The next time that it comes there it waits for `release`: in the plan ("preparing"), when a source takes
        its second piece ("moving"), when the last piece is scattered or, where nothing is scattered, verified
        ("landing").
        """
        self._where, self._passed = where, 0
        self._held.clear()
        self._go.clear()

    def held(self) -> bool:
        return self._held.is_set()

    def release(self) -> None:
        self._where = ""
        self._go.set()

    def _install_holds(self) -> None:
        self._where, self._passed = "", 0
        self._held, self._go = threading.Event(), threading.Event()
        memory, preparer = self.memory, self._endpoint._preparer
        moves = [(memory, name) for name in ("gather", "runs")]
        for thing, name, condition in (
            (preparer, "prepare", lambda: self._where == "preparing"),
            *((thing, name, self._takes_second) for thing, name in moves),
            *((memory, name, self._lands) for name in ("scatter", "gather")),
        ):
            setattr(thing, name, self._waits(getattr(thing, name), condition))

    def _waits(self, call: Callable[..., Any], condition: Callable[[], bool]) -> Callable[..., Any]:
        def held(*args: Any) -> Any:
            if condition():
                self._held.set()
                self._go.wait(HOLD_S)
            return call(*args)

        return held

    def _takes_second(self) -> bool:
        if self._where != "moving":
            return False
        self._passed += 1
        return self._passed > 1

    def _lands(self) -> bool:
        running = list(self._endpoint._machine.targets.running.values())
        return self._where == "landing" and any(t.phase in ("landing", "verifying") for t in running)


@contextmanager
def _advertised(address: str) -> Iterator[list[str]]:
    """Endpoints made inside name this address to their peers. Yields the real ones."""
    real: list[str] = []

    class Behind(Lines):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            real.append(self.address)
            self.address = address

    honest = kvferry.session.endpoint.Lines
    setattr(kvferry.session.endpoint, "Lines", Behind)  # noqa: B010
    try:
        yield real
    finally:
        setattr(kvferry.session.endpoint, "Lines", honest)  # noqa: B010
