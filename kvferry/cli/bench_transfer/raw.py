"""The same bytes moved without kvferry: one thread posts one descriptor per run, straight from memory to memory.

These are the lines to compare with, so each is as good as its transport allows: descriptors are arrays, made before the
clock starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from kvferry.cli.bench_transfer.cases import WIRE_BYTES
from kvferry.cli.bench_transfer.pool import GUARD_BYTES, WorkerPool
from kvferry.errors import TransportError
from kvferry.layout.address import U64, Address, Addresses, join
from kvferry.plan.bind import Copies
from kvferry.transport.copies import copy_runs
from kvferry.transport.local import IOVECS, move_runs
from kvferry.transport.nixl import HOST_MEMORY, need_nixl
from kvferry.transport.staging import map_file

LIMIT_S = 120.0
PROGRESS_S = 0.0005
ACK = b"\1"


@dataclass(frozen=True)
class Card:
    """What a source needs to reach a target's memory. `address` is where the memory of the pool starts there."""

    pid: int
    fd: int
    file_bytes: int
    address: Address
    port: int = 0
    agent: str = ""
    metadata: bytes = b""


class Reader(Protocol):
    """The target's side."""

    card: Card

    def read(self, runs: Copies) -> None:
        """Return when all runs are here; at once where the source does everything."""

    def close(self) -> None: ...


class Writer(Protocol):
    """The source's side, for all targets."""

    def write(self, runs: Sequence[Copies]) -> None:
        """Return when every run of each target has been written."""

    def close(self) -> None: ...


def cut(runs: Copies, nbytes: int = WIRE_BYTES) -> Copies:
    """The same bytes in descriptors of at most `nbytes`."""
    pieces = []
    for row, length in enumerate(runs.lengths.tolist()):
        starts = np.arange(0, length, nbytes, dtype=np.int64).astype(np.uint64)
        lengths = np.minimum(np.uint64(nbytes), np.uint64(length) - starts)
        one = slice(row, row + 1)
        pieces.append(Copies(runs.source.take(one).plus(starts), runs.target.take(one).plus(starts), lengths))
    lengths = np.concatenate([piece.lengths for piece in pieces])
    return Copies(join([piece.source for piece in pieces]), join([piece.target for piece in pieces]), lengths)


def open_reader(transport: str, pool: WorkerPool) -> Reader:
    card = Card(os.getpid(), pool.fd, pool.file.nbytes, pool.address)
    return READERS[transport](pool, card)


def open_writer(transport: str, pool: WorkerPool, cards: Sequence[Card]) -> Writer:
    return WRITERS[transport](pool, cards)


class PassiveReader:
    """The source does everything."""

    def __init__(self, pool: WorkerPool, card: Card) -> None:
        self.card = card

    def read(self, runs: Copies) -> None:
        pass

    def close(self) -> None:
        pass


class ShmWriter:
    """Copies between the own memory and the target's, mapped here."""

    def __init__(self, pool: WorkerPool, cards: Sequence[Card]) -> None:
        self._pool, self._cards, self._maps = pool, cards, []
        for card in cards:
            fd = os.open(f"/proc/{card.pid}/fd/{card.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._maps.append(map_file(fd, card.file_bytes)[GUARD_BYTES:-GUARD_BYTES])
            finally:
                os.close(fd)

    def write(self, runs: Sequence[Copies]) -> None:
        own = self._pool
        for card, there, some in zip(self._cards, self._maps, runs):
            to = some.target.offsets_in(card.address, there.nbytes, some.lengths, "the target's memory")
            out_of = some.source.offsets_in(own.address, own.bytes.nbytes, some.lengths, "the source's memory")
            copy_runs(there, to, own.bytes, out_of, some.lengths)

    def close(self) -> None:
        self._maps = []


class ProcessVmWriter:
    def __init__(self, pool: WorkerPool, cards: Sequence[Card]) -> None:
        self._cards = cards

    def write(self, runs: Sequence[Copies]) -> None:
        for card, some in zip(self._cards, runs):
            move_runs("process_vm_writev", card.pid, some.source, some.target, some.lengths)

    def close(self) -> None:
        pass


class TcpReader:
    """`readv` straight into the runs, then one byte back."""

    def __init__(self, pool: WorkerPool, card: Card) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        self._connection: socket.socket | None = None
        self.card = Card(card.pid, card.fd, card.file_bytes, card.address, self._listener.getsockname()[1])

    def read(self, runs: Copies) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.setblocking(True)
        _move_vectors("readv", self._connection.fileno(), runs.target, runs.lengths)
        self._connection.sendall(ACK)

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


class TcpWriter:
    """`writev` straight from the runs to each target, then one byte from each."""

    def __init__(self, pool: WorkerPool, cards: Sequence[Card]) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", card.port), LIMIT_S) for card in cards]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(True)

    def write(self, runs: Sequence[Copies]) -> None:
        for connection, some in zip(self._sockets, runs):
            _move_vectors("writev", connection.fileno(), some.source, some.lengths)
        for connection in self._sockets:
            if connection.recv(1) != ACK:
                raise TransportError("tcp: the target ended before it had all bytes")

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


class _Agent:
    """A NIXL agent whose memory is all of a pool."""

    def __init__(self, pool: WorkerPool) -> None:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # as kvferry's own agents: never on another network
        api = need_nixl()
        self.name = f"bench-{secrets.token_hex(8)}"
        # NIXL's own progress thread burns a core and there are few: both ways were tried, this one is the faster here
        self.api: Any = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        rows = [(pool.address.value, pool.bytes.nbytes, 0, "")]
        self.registered = self.api.register_memory(self.api.get_reg_descs(rows, HOST_MEMORY))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # NIXL's errors have no common base, and this is the end anyway
            self.api.deregister_memory(self.registered)
        self.api = None


class NixlReader:
    """Makes progress, which some of UCX's ways need."""

    def __init__(self, pool: WorkerPool, card: Card) -> None:
        self._agent = _Agent(pool)
        metadata = self._agent.api.get_agent_metadata()
        self.card = Card(card.pid, card.fd, card.file_bytes, card.address, agent=self._agent.name, metadata=metadata)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._progress, name="bench-nixl", daemon=True)
        self._thread.start()

    def read(self, runs: Copies) -> None:
        pass

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._agent.close()

    def _progress(self) -> None:
        while not self._closed.wait(PROGRESS_S):
            self._agent.api.get_new_notifs()


class NixlWriter:
    """One request per target, of uint64 descriptor arrays; all are posted, then awaited."""

    def __init__(self, pool: WorkerPool, cards: Sequence[Card]) -> None:
        self._agent, self._cards = _Agent(pool), cards
        for card in cards:
            self._agent.api.add_remote_agent(card.metadata)

    def write(self, runs: Sequence[Copies]) -> None:
        api = self._agent.api
        handles = []
        for card, some in zip(self._cards, runs):
            ours, theirs = (
                api.get_xfer_descs(_rows(side, some.lengths), HOST_MEMORY) for side in (some.source, some.target)
            )
            handle = api.initialize_xfer("WRITE", ours, theirs, card.agent)
            handles.append((handle, api.transfer(handle)))
        end_s = time.monotonic() + LIMIT_S
        for handle, state in handles:
            while state == "PROC" and time.monotonic() < end_s:
                state = api.check_xfer_state(handle)
            if state != "DONE":
                raise TransportError(f"nixl: the raw write ended as {state}")
            api.release_xfer_handle(handle)

    def close(self) -> None:
        for card in self._cards:
            with contextlib.suppress(Exception):
                self._agent.api.remove_remote_agent(card.agent)
        self._agent.close()


READERS: dict[str, Callable[[WorkerPool, Card], Reader]] = {
    "shm": PassiveReader,
    "process_vm": PassiveReader,
    "tcp": TcpReader,
    "nixl": NixlReader,
}
WRITERS: dict[str, Callable[[WorkerPool, Sequence[Card]], Writer]] = {
    "shm": ShmWriter,
    "process_vm": ProcessVmWriter,
    "tcp": TcpWriter,
    "nixl": NixlWriter,
}


def _rows(addresses: Addresses, lengths: U64) -> U64:
    """One row of (address, bytes, device) per descriptor."""
    return np.ascontiguousarray(np.stack([addresses.u64, lengths, np.zeros(len(lengths), np.uint64)], axis=1))


def _move_vectors(call: str, fd: int, addresses: Addresses, lengths: U64) -> None:
    """`readv` or `writev` of many runs on a blocking socket."""
    function = _system_call(call)
    row, done = 0, np.uint64(0)  # runs moved, and bytes moved of the next one
    while row < len(lengths):
        rows = slice(row, row + IOVECS)
        left, skip = lengths[rows].copy(), np.zeros(len(lengths[rows]), np.uint64)
        left[0] -= done
        skip[0] = done
        vectors = np.ascontiguousarray(np.stack([addresses.take(rows).plus(skip).u64, left], axis=1))
        moved = function(fd, vectors.ctypes.data, len(vectors))
        if moved <= 0:
            raise TransportError(f"tcp: {call}: {os.strerror(ctypes.get_errno()) if moved else 'the other side ended'}")
        ends = np.cumsum(left, dtype=np.uint64)
        whole = int(np.searchsorted(ends, np.uint64(moved), side="right"))
        done = np.uint64(moved) - ends[whole - 1] if whole else done + np.uint64(moved)
        row += whole


@cache
def _system_call(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    function.restype = ctypes.c_ssize_t
    return function
