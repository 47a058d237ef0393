"""Real worker processes for the tests: each holds one endpoint at a time and obeys the test through a pipe."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvferry.layout.address import Address
from kvferry.layout.request import Wanted
from kvferry.session.endpoint import Endpoint
from kvferry.session.messages import decode
from kvferry.session.transfer import Transfer
from kvferry.transport.memory import HostMemory, map_array, window
from tests.session.pools import Shape, WorkerPool, instance, page_list, table

ANSWER_S = 60.0
_names = itertools.count()


class Worker:
    """The child's side."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.transfers: dict[str, Transfer] = {}

    def open(self, name: str, shape: Shape, rank: int, registry: str, **options: Any) -> str:
        self.close()
        self.pool = WorkerPool(shape, rank)
        self.name, self.rank = name, rank
        region = window(shape.base, self.pool.bytes_view) if shape.base else map_array(self.pool.bytes_view)
        self.memory = HostMemory([region])
        document = instance(name, shape, (self.pool.worker(),))
        self.endpoint = Endpoint(document, rank, self.memory, world=shape.world, registry=registry, **options)
        return str(self.endpoint._me)

    def fill(self, pages: list[int], start: int, tokens: tuple[int, int]) -> None:
        self.pool.fill(pages, start, tokens)

    def send(self, transfer: str, pages: list[int], start: int, tokens: tuple[int, int], timeout_s: float) -> None:
        groups = {"attn": Wanted(tokens)}
        self.transfers[transfer] = self._endpoint.send(transfer, groups, table(pages, start), timeout_s=timeout_s)

    def send_part(
        self,
        transfer: str,
        pages: list[int],
        tokens: tuple[int, int],
        last: bool,
        layers: list[int] | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        """The first call sends, later ones extend. Its fence fills the pages, so whoever reads before it reads junk."""
        groups, side = {"attn": Wanted(tokens)}, table(pages, 0)

        def fence() -> None:
            self.pool.fill(pages, 0, tokens)

        more = {"layers": layers, "last": last, "fence": fence}
        if transfer in self.transfers:
            self._endpoint.extend(self.transfers[transfer], groups, side, **more)
        else:
            self.transfers[transfer] = self._endpoint.send(transfer, groups, side, timeout_s=timeout_s, **more)

    def receive(
        self,
        transfer: str,
        source: str,
        pages: list[int],
        start: int,
        tokens: tuple[int, int],
        timeout_s: float,
        registry: str = "",
        piece_tokens: int = 0,
    ) -> None:
        groups, side = {"attn": Wanted(tokens)}, table(pages, start)
        self.transfers[transfer] = self._endpoint.receive(
            transfer, source, groups, side, timeout_s=timeout_s, registry=registry, piece_tokens=piece_tokens
        )

    def connect(self, source: str, timeout_s: float) -> None:
        self._endpoint.connect(source, timeout_s=timeout_s)

    def wait(self, transfer: str) -> Any:
        return self._endpoint.wait(self.transfers[transfer])

    def abort(self, transfer: str, reason: str) -> None:
        self._endpoint.abort(self.transfers[transfer], reason)

    def wrong_words(self, pages: list[int], start: int, tokens: tuple[int, int]) -> int:
        """Words of the whole pool, wanted or not, that aren't as they must be."""
        return int(np.count_nonzero(self.pool.memory != self.pool.expected(pages, start, tokens)))

    def wrong_words_of(self, fills: list[tuple[list[int], int, tuple[int, int]]]) -> int:
        """As `wrong_words`, after several transfers."""
        twin = WorkerPool(self.pool.shape, self.pool.rank)
        for fill in fills:
            twin.fill(*fill)
        return int(np.count_nonzero(self.pool.memory != twin.memory))

    def untouched(self) -> bool:
        return bool((self.pool.memory == WorkerPool(self.pool.shape, self.pool.rank).memory).all())

    def cpu_while_idle(self, seconds: float) -> float:
        """This process's share of one core while it has nothing to do."""
        started = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - started) / seconds

    def landed(self, transfer: str) -> int:
        running = self._endpoint._machine.targets.running.get(transfer)
        return sum(flow.landed for flow in running.flows.values()) if running else -1

    def pages_free(self, transfer: str) -> bool:
        return self.transfers[transfer].pages_free

    def damage(self, where: str) -> None:
        """From now on one byte goes wrong: on the wire, by a scatter, in the pages that runs are taken from; or
        ("nothing") the first half of each chunk is never scattered.
        """
        honest = {name: getattr(self.memory, name) for name in ("scatter", "runs")}

        def wire(copies: Any, chunk: Any) -> None:
            chunk[len(chunk) // 2] ^= 1
            honest["scatter"](copies, chunk)

        def scatter(copies: Any, chunk: Any) -> None:
            honest["scatter"](copies, chunk)
            self.memory.view(copies.addresses.first(), 1)[0] ^= 1

        def runs(copies: Any) -> Any:
            found = honest["runs"](copies)
            self.memory.view(copies.addresses.first(), 1)[0] ^= 1
            return found

        def nothing(copies: Any, chunk: Any) -> None:
            half = len(copies.lengths) // 2
            rest = replace(
                copies,
                addresses=copies.addresses.take(slice(half, None)),
                dense_offsets=copies.dense_offsets[half:],
                lengths=copies.lengths[half:],
            )
            honest["scatter"](rest, chunk)

        damaged = {"wire": wire, "scatter": scatter, "runs": runs, "nothing": nothing}[where]
        setattr(self.memory, "runs" if where == "runs" else "scatter", damaged)

    def forbid(self, name: str) -> None:
        """From now on `name` of this worker's memory may not be called."""

        def forbidden(*_: Any) -> None:
            raise AssertionError(f"{name} was called")

        setattr(self.memory, name, forbidden)

    def lose(self, kind: str, count: int = 1) -> None:
        """The next `count` messages of this kind never leave."""
        send, left = self._endpoint._lines.send, [count]

        def lossy(peer: Any, data: bytes) -> None:
            if left[0] and type(decode(data).body).__name__ == kind:
                left[0] -= 1
            else:
                send(peer, data)

        setattr(self._endpoint._lines, "send", lossy)  # noqa: B010

    def slow(self, seconds: float) -> None:
        """Gathering, scattering or looking up a chunk takes this much longer from now on."""
        for name in ("gather", "scatter", "runs"):
            setattr(self.memory, name, _after(seconds, getattr(self.memory, name)))

    def ask_for_heads(self, start: int, stop: int) -> None:
        """From now on this target asks every source for these heads, whatever was routed."""
        honest = self._endpoint._preparer.prepare

        def prepare(order: Any) -> Any:
            prepared = honest(order)
            for rank, shipment in prepared.shipments.items():
                pieces = tuple(
                    msgspec.structs.replace(
                        piece,
                        chunk=msgspec.structs.replace(
                            piece.chunk,
                            box=msgspec.structs.replace(
                                piece.chunk.box, axes={**piece.chunk.box.axes, "head": ((start, stop),)}
                            ),
                        ),
                    )
                    for piece in shipment.pieces
                )
                prepared.shipments[rank] = replace(shipment, pieces=pieces)
            return prepared

        setattr(self._endpoint._preparer, "prepare", prepare)  # noqa: B010

    def begin_drain(self, timeout_s: float) -> None:
        self._drain = ThreadPoolExecutor(1).submit(self._endpoint.drain, timeout_s)

    def end_drain(self) -> bool:
        return self._drain.result(ANSWER_S)

    def poll(self) -> list[tuple[str, str]]:
        return [(transfer.id, transfer.state) for transfer in self._endpoint.poll()]

    def links(self) -> dict[str, str]:
        return self._endpoint.links()

    def stats(self) -> dict[str, int]:
        return self._endpoint.stats()

    def address(self) -> str:
        return self._endpoint._machine.core.card.address

    def cpu_s(self) -> float:
        return time.process_time()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None
        self.transfers = {}

    @property
    def _endpoint(self) -> Endpoint:
        assert self.endpoint is not None
        return self.endpoint


def _after(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def slower(*args: Any) -> Any:
        time.sleep(seconds)
        return call(*args)

    return slower


def serve(pipe: Connection, kind: type[Worker]) -> None:
    worker = kind()
    while True:
        try:
            name, args, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, name)(*args, **options)))
        except Exception as error:
            cause = error.__cause__
            error.__cause__ = error.__context__ = None
            pipe.send((False, (type(error), str(error), str(cause) if cause else "")))


class RemoteError(Exception):
    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(f"{kind.__name__}: {text}")
        self.kind, self.text = kind, text


class Member:
    """The test's handle on one worker process, which holds a `kind`."""

    def __init__(self, kind: type[Worker] = Worker) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, kind), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, *args: Any, **options: Any) -> None:
        self._pipe.send((name, args, options))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"worker process {self.process.pid} does not answer")
        good, value = self._pipe.recv()
        if not good:
            raise RemoteError(value[0], value[1])
        return value

    def __call__(self, name: str, *args: Any, **options: Any) -> Any:
        self.begin(name, *args, **options)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Crew:
    """Worker processes that are reused from test to test, since starting one costs more than most tests."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def take(self, count: int) -> list[Member]:
        self._members = [member for member in self._members if member.process.is_alive()]
        while len(self._members) < count:
            self._members.append(Member())
        return self._members[:count]

    def rest(self) -> None:
        """Close every endpoint."""
        living = [member for member in self._members if member.process.is_alive()]
        every(living, "close")

    def close(self) -> None:
        for member in self._members:
            if member.process.is_alive():
                member.kill()


def every(members: list[Member], name: str, *args: Any, **options: Any) -> list[Any]:
    """The same command to all, which work side by side."""
    for member in members:
        member.begin(name, *args, **options)
    return answers(members)


def answers(members: list[Member]) -> list[Any]:
    """One answer of each; the first error is raised when all have answered, so that no answer is left over."""
    found: list[Any] = []
    for member in members:
        try:
            found.append(member.answer())
        except RemoteError as error:
            found.append(error)
    for answer in found:
        if isinstance(answer, RemoteError):
            raise answer
    return found


def open_all(
    members: list[Member], name: str, shape: Shape, registry: str, staging_base: Address | None = None, **options: Any
) -> None:
    for rank, member in enumerate(members):
        member.begin("open", name, shape, rank, registry, staging_base=staging_base, **options)
    answers(members)


@dataclass
class Pair:
    """A prefill and a decode instance, running."""

    source: str
    target: str
    sources: list[Member]
    targets: list[Member]
    source_shape: Shape
    target_shape: Shape


def open_pair(crew: Crew, registry: str, source: Shape, target: Shape, **options: object) -> Pair:
    number = next(_names)
    names = (f"prefill-{number}", f"decode-{number}")
    members = crew.take(source.world + target.world)
    pair = Pair(*names, members[: source.world], members[source.world :], source, target)
    options = {"slots": 4, "slot_bytes": 1024, "digest": True, **options}
    open_all(pair.sources, names[0], source, registry, **options)  # type: ignore[arg-type]
    open_all(pair.targets, names[1], target, registry, **options)  # type: ignore[arg-type]
    return pair


def start(
    pair: Pair,
    transfer: str,
    tokens: tuple[int, int],
    timeout_s: float = 20.0,
    receive_first: bool = False,
    sent: tuple[int, int] | None = None,
    registry: str = "",
) -> list[int]:
    """Fill the source and start both sides; returns the target's pages. `registry`: the source's, if another."""
    sent = sent or (0, tokens[1])
    start_at = tokens[0]
    source_pages = page_list(pair.source_shape, sent, sent[0], seed=1)
    target_pages = page_list(pair.target_shape, tokens, start_at, seed=2)
    every(pair.sources, "fill", source_pages, sent[0], sent)
    calls = [
        (pair.sources, "send", (transfer, source_pages, sent[0], sent, timeout_s)),
        (pair.targets, "receive", (transfer, pair.source, target_pages, start_at, tokens, timeout_s, registry)),
    ]
    for members, name, args in reversed(calls) if receive_first else calls:
        every(members, name, *args)
    return target_pages
