"""A worker process of the benchmark: it holds one pool, moves its cells as it is told, and answers through a pipe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cli.bench_transfer.cases import GROUP, Scenario, SideName
from kvferry.cli.bench_transfer.pool import WorkerPool
from kvferry.cli.bench_transfer.raw import Card, Reader, Writer, open_reader, open_writer
from kvferry.layout.address import Address
from kvferry.layout.document import Instance
from kvferry.layout.request import Wanted
from kvferry.plan.bind import Copies
from kvferry.plan.dense import Chunk, DenseCopies, chunk_bytes, dense_copies, split
from kvferry.plan.follow import best_order
from kvferry.plan.route import route
from kvferry.plan.wanted import owned_bytes
from kvferry.session.endpoint import Endpoint
from kvferry.session.prepare import landed_piece_bytes
from kvferry.session.transfer import Transfer
from kvferry.transport.base import Transport, open_transport
from kvferry.transport.memory import HostMemory, map_array
from kvferry.transport.staging import Staging

TIMEOUT_S = 120.0
SLOT_BYTES = 8 << 20
PROBE_BYTES = 4096


@dataclass(frozen=True)
class Stages:
    """What the steps of a transfer take when nothing else runs, summed over all workers: find the runs, gather them
    into chunks, scatter chunks into pages. Seconds.
    """

    bind_s: float
    gather_s: float
    scatter_s: float


class Worker:
    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._endpoint: Endpoint | None = None
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._staging: Staging | None = None
        self._transport: Transport | None = None
        self._runs: list[Copies] = []

    # the pool

    def open(self, scenario: Scenario, side: SideName, rank: int) -> Address:
        """A pool with fresh memory; returns where that is."""
        self.close()
        self._scenario, self._side, self._rank = scenario, side, rank
        self._pool = WorkerPool(scenario, side, rank)
        if side == "source":
            self._pool.fill()
        return self._pool.address

    def clear(self) -> None:
        self.pool.clear()

    def wrong_bytes(self) -> int:
        return self.pool.wrong_bytes()

    def close(self) -> None:
        self.close_ways()
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def close_ways(self) -> None:
        for way in (self._endpoint, self._writer, self._reader):
            if way is not None:
                way.close()
        self._endpoint = self._writer = self._reader = None

    # by kvferry

    def open_endpoint(self, name: str, registry: str, transport: str, options: dict[str, str]) -> None:
        pool = self.pool
        self._endpoint = Endpoint(
            self._instance(self._side, name),
            self._rank,
            HostMemory([map_array(pool.bytes)]),
            world=self._scenario.shape(self._side).world,
            registry=registry,
            transport=transport,
            slot_bytes=SLOT_BYTES,
            **options,  # type: ignore[arg-type]  # checked by Endpoint
        )

    def offers_waiting(self) -> int:
        return self.endpoint.stats()["offers_waiting"]

    def send(self, transfer: str, empty: bool) -> float:
        """Send, wait for the end of it, and return when it began."""
        started_s = time.monotonic()
        sent = self.endpoint.send(transfer, self._wanted(empty), self._scenario.table("source"), timeout_s=TIMEOUT_S)
        self.endpoint.wait(sent)
        return started_s

    def receive(self, transfer: str, source: str, empty: bool) -> float:
        """Receive, and return when the pages could be used."""
        tables = self._scenario.table("target")
        wanted: Transfer = self.endpoint.receive(transfer, source, self._wanted(empty), tables, timeout_s=TIMEOUT_S)
        self.endpoint.wait(wanted)
        return time.monotonic()

    def _wanted(self, empty: bool) -> dict[str, Wanted]:
        tokens = self._scenario.tokens
        return {GROUP: Wanted((tokens if empty else 0, tokens))}

    # without kvferry

    def set_runs(self, runs: Sequence[Copies]) -> None:
        """As a source: what goes to each target. As a target: what comes."""
        self._runs = list(runs)

    def open_reader(self, transport: str) -> Card:
        self._reader = open_reader(transport, self.pool)
        return self._reader.card

    def open_writer(self, transport: str, cards: Sequence[Card]) -> None:
        self._writer = open_writer(transport, self.pool, cards)

    def raw_write(self) -> tuple[float, float]:
        assert self._writer is not None
        started_s = time.monotonic()
        self._writer.write(self._runs)
        return started_s, time.monotonic()

    def raw_read(self) -> None:
        assert self._reader is not None
        self._reader.read(self._runs[0])

    # the steps alone

    def stages(self) -> Stages:
        """As a source: everything that targets ask this worker for. As a target: everything that it asks for."""
        memory = HostMemory([map_array(self.pool.bytes)])
        buffer = np.zeros(SLOT_BYTES, np.uint8)
        bind_s = move_s = 0.0
        for chunk in self._chunks():
            started_s = time.perf_counter()
            copies = self._dense(chunk)
            bound_s = time.perf_counter()
            data = buffer[: copies.total_bytes]
            if self._side == "source":
                memory.gather(copies, data)
            else:
                memory.scatter(copies, data)
            bind_s += bound_s - started_s
            move_s += time.perf_counter() - bound_s
        return Stages(bind_s, move_s, 0.0) if self._side == "source" else Stages(0.0, 0.0, move_s)

    def _chunks(self) -> list[Chunk]:
        scenario = self._scenario
        source, target = (self._instance(side, side) for side in ("source", "target"))
        ranks = range(scenario.target.world) if self._side == "source" else [self._rank]
        chunks = []
        for rank in ranks:
            for step in route(source, target, rank):
                if self._side == "target" or step.source == self._rank:
                    workers = source.worker(step.source), target.worker(rank)
                    order = best_order(scenario.group, step.box, *workers)
                    owed = owned_bytes(workers[1], scenario.group, (0, scenario.tokens))
                    limit = landed_piece_bytes(owed, SLOT_BYTES)
                    chunks += split(scenario.group, step.box, (0, scenario.tokens), limit, order=order)
        return [chunk for chunk in chunks if chunk_bytes(scenario.group, chunk)]

    def _instance(self, side: SideName, name: str) -> Instance:
        """A side as if all its workers had their memory where this one has it: each has an address space of its own."""
        here = [self.pool.address.value for _ in range(self._scenario.shape(side).world)]
        return self._scenario.instance(side, name, here)

    def _dense(self, chunk: Chunk) -> DenseCopies:
        return dense_copies(self.pool.worker, self._scenario.group, chunk, self._scenario.table(self._side))

    # whether a transport works here

    def export(self, transport: str) -> bytes:
        self._staging = Staging(1, PROBE_BYTES)
        self._transport = open_transport(transport, self._staging)
        return self._transport.export()

    def try_export(self, transport: str, export: bytes) -> None:
        """TransportUnavailable with the reason where the transport can't be used between two processes here."""
        staging = Staging(1, PROBE_BYTES)
        opened = open_transport(transport, staging)
        try:
            opened.connect(export).close()
        finally:
            opened.close()
            staging.close()

    def close_export(self) -> None:
        for opened in (self._transport, self._staging):
            if opened is not None:
                opened.close()
        self._transport = self._staging = None

    @property
    def pool(self) -> WorkerPool:
        assert self._pool is not None
        return self._pool

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint
