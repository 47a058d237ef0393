"""A worker process of the soak: one endpoint, and the pages of its requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvferry.cli.soak.pool import GROUP, Shape, WorkerPool
from kvferry.errors import PeerLost, TransferAborted, TransferCorrupted, TransferError, TransferRefused, TransferTimeout
from kvferry.layout.request import Side, Table, Wanted
from kvferry.session.endpoint import Endpoint
from kvferry.session.keys import read_keys
from kvferry.session.messages import Role
from kvferry.session.transfer import Transfer
from kvferry.transport.memory import HostMemory, map_array

SLOTS, SLOT_BYTES = 8, 16 << 10
TTL_S = 2.0
SOMEBODY_ELSE = 1 << 29
"""Added to the seed of a failed request: what its pages hold once they belong to somebody else."""
HOWS: dict[type[TransferError], str] = {
    TransferTimeout: "timeout",
    TransferAborted: "aborted",
    TransferRefused: "refused",
    PeerLost: "lost",
    TransferCorrupted: "corrupted",
}


@dataclass(frozen=True)
class Request:
    """What every rank of both sides is told. Tokens `hit` … `tokens` travel; the target has those before them already.

    `steps`: after how many tokens each part of a growing send ends; the last one is `tokens`.
    """

    id: str
    source: str
    target: str
    seed: int
    tokens: int
    hit: int
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    steps: tuple[int, ...]
    step_s: float
    offer_first: bool
    timeout_s: float


@dataclass(frozen=True)
class Ended:
    """The end of a request on one rank, which has given its pages to somebody else by now if it failed."""

    request: str
    role: Role
    how: str
    problem: str
    wrong_bytes: int


@dataclass(frozen=True)
class Look:
    """What a worker holds while nothing should run. `greeted`: peers whose answer to a hello it still waits for.
    `errors`: what it has logged as such, since an error that nobody sees is one too.
    """

    slots_held: int
    transfers: int
    greeted: int
    wrong_bytes: int
    errors: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.slots_held or self.transfers or self.greeted)


class Complaints(logging.Handler):
    """Keeps the errors, says nothing: a killed peer is what everybody warns of here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        problem = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.lines.append(f"{record.getMessage()}{problem}"[:400])


class Worker:
    def __init__(self) -> None:
        self._complaints = Complaints()
        logging.getLogger("kvferry").addHandler(self._complaints)
        logging.getLogger("kvferry").propagate = False

    def open(self, name: str, shape: Shape, rank: int, registry: str, transport: str, keys: Path | None) -> None:
        """`keys`: the folder of this worker's keys, if it has any."""
        self.pool = WorkerPool(shape, rank)
        self.endpoint = Endpoint(
            shape.instance(name, self.pool.address),
            rank,
            HostMemory([map_array(self.pool.bytes)]),
            world=shape.tp,
            registry=registry,
            transport=transport,
            slots=SLOTS,
            slot_bytes=SLOT_BYTES,
            digest=True,
            ttl_s=TTL_S,
            keys=read_keys(keys) if keys else None,
        )
        self._running: dict[tuple[Role, str], tuple[Transfer, Request]] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []

    def turn(self, commands: Sequence[tuple[str, object]]) -> list[Ended]:
        """Do what is said, and say what has ended since the last turn."""
        for name, what in commands:
            getattr(self, name)(what)
        now = time.monotonic()
        due = [call for at_s, call in self._later if at_s <= now]
        self._later = [later for later in self._later if later[0] > now]
        for call in due:
            call()
        self.endpoint.poll()
        over = [key for key, (transfer, _) in self._running.items() if transfer.state != "running"]
        return [self._ended(*key) for key in over if self._running[key][0].pages_free]

    def look(self) -> Look:
        stats = self.endpoint.stats()
        held = stats["slots_used"] + stats["slots_quarantined"] + stats["pieces_quarantined"]
        transfers = len(self._running) + stats["transfers_receiving"] + stats["transfers_sending"]
        errors, self._complaints.lines = tuple(self._complaints.lines), []
        transfers += stats["offers_waiting"]
        return Look(held, transfers, stats["peers_greeted"], self.pool.wrong_bytes(), errors)

    # the commands

    def send(self, request: Request) -> None:
        began_s, (first, *others) = time.monotonic(), request.steps
        self._fill(request, first)
        transfer = self.endpoint.send(
            request.id, *self._part(request, first), timeout_s=request.timeout_s, last=not others
        )
        self._running["source", request.id] = transfer, request
        for index, stop in enumerate(others):
            self._later.append((began_s + request.step_s * (index + 1), partial(self._extend, transfer, request, stop)))

    def receive(self, request: Request) -> None:
        groups = {GROUP: Wanted((request.hit, request.tokens))}
        tables = Side({GROUP: Table(request.target_pages, request.hit)})
        piece_tokens = max(1, request.tokens // 4) if len(request.steps) > 1 else 0
        transfer = self.endpoint.receive(
            request.id, request.source, groups, tables, timeout_s=request.timeout_s, piece_tokens=piece_tokens
        )
        self._running["target", request.id] = transfer, request

    def abort(self, request: str) -> None:
        for (_, name), (transfer, _) in self._running.items():
            if name == request:
                self.endpoint.abort(transfer, "the user went away")

    # what they need

    def _part(self, request: Request, stop: int) -> tuple[dict[str, Wanted], Side]:
        return {GROUP: Wanted((0, stop))}, Side({GROUP: Table(request.source_pages, 0)})

    def _fill(self, request: Request, stop: int) -> None:
        self.pool.fill(request.seed, request.source_pages, 0, (0, stop))

    def _extend(self, transfer: Transfer, request: Request, stop: int) -> None:
        if transfer.state != "running":  # its pages are somebody else's by now
            return
        self._fill(request, stop)
        self.endpoint.extend(transfer, *self._part(request, stop), last=stop == request.tokens)

    def _ended(self, role: Role, name: str) -> Ended:
        transfer, request = self._running.pop((role, name))
        error, wrong_bytes = transfer.error, 0
        where = (request.target_pages, request.hit, (request.hit, request.tokens))
        if role == "target" and error is None:
            wrong_bytes = self.pool.wrong_bytes_of(request.seed, *where)
            self.pool.expect(request.seed, *where)
        elif role == "target":
            self.pool.fill(request.seed + SOMEBODY_ELSE, *where)
        how = "done" if error is None else HOWS[type(error)]
        return Ended(name, role, how, str(error or ""), wrong_bytes)
