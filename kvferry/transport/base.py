"""The contract of a transport: bytes into granted slots of a target's staging memory, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, Optional, Protocol, TypeAlias

import msgspec
import numpy as np

from kvferry.errors import TransportError
from kvferry.layout.address import U64, Address, Addresses
from kvferry.layout.document import Struct
from kvferry.transport.copies import Bytes
from kvferry.transport.runs import Runs
from kvferry.transport.staging import KEY_BYTES, Size, Slots, Staging

if TYPE_CHECKING:
    from kvferry.plan.dense import DenseCopies

NAMES = ("auto", "local", "shm", "process_vm", "tcp", "nixl")
"""What `open_transport` knows."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class LocalCard(Struct, frozen=True):
    """How a process on the same host finds the staging memory: the file and the mapping of one process."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_ticks: Natural
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    inode: Natural
    file_bytes: Size
    address: Address  # of the header page, as that process sees it


class TcpCard(Struct, frozen=True):
    """Where a target listens."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]


class NixlCard(Struct, frozen=True):
    """What a NIXL agent needs to reach another one, and where the staging memory starts in that process."""

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    address: Address  # of the header page
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0


class Export(Struct, frozen=True):
    """What a peer needs to reach our staging. A way that is not offered is None."""

    format: Literal["kvferry-transport/1"]
    slots: Slots
    key: Key
    shm: Optional[LocalCard] = None
    process_vm: Optional[LocalCard] = None
    tcp: Optional[TcpCard] = None
    nixl: Optional[NixlCard] = None


Fill: TypeAlias = Callable[[Bytes], None]
"""Puts all bytes of one write into the memory it is given."""


class LinkClosed(TransportError):
    """Nothing of this write was sent: the link had been closed before, as when another write broke it."""


class Peer(Protocol):
    """A target that we can write to. Thread-safe."""

    name: str
    """The way that was chosen: shm, process_vm, nixl or tcp."""
    reason: str
    """Why, with what was tried before."""

    def write(self, address: Address, grant: bytes, nbytes: int, fill: Fill, timeout_s: float) -> None:
        """Block until the bytes that `fill` gives are visible in the target's slot at `address`.

        `fill` gets `nbytes` bytes of memory: the slot itself where this process can reach it, else memory that the
        bytes then leave from. Whatever it raises is passed on. TransportError: whether bytes arrived is unknown, and
        this peer may be of no further use. LinkClosed: it was already, and nothing was sent. Either way this write
        touches the target no more (over tcp: once its grant has been revoked); where that can't be known when
        `timeout_s` has passed, the call goes on until it is.
        """

    moves: bool
    """Whether `move` works."""

    def move(self, source: Addresses, target: Addresses, lengths: U64, timeout_s: float) -> None:
        """Block until run i, `lengths[i]` bytes at `source[i]` in this process, lies at `target[i]` in the target's.

        One descriptor per run and nothing gathered. Both are addresses as the processes themselves see them, in memory
        that they have given their transports. Errors and their meaning are those of `write`.
        """

    def slot_at(self, address: Address, nbytes: int) -> Address:
        """Where a range of a slot is in the target's process. TransportError where it is in no slot."""

    def close(self) -> None:
        """Give everything back; may be called again."""


class Transport(Protocol):
    """One side's way to be written to, and to write."""

    name: str

    def export(self) -> bytes:
        """What a peer needs to connect, as MessagePack."""

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        """From now on `nbytes` bytes from the start of `slot` may be written by who knows `grant`."""

    def revoke(self, grant: bytes) -> None:
        """Over tcp: when this returns, nothing is written under this grant any more. Unknown grants are ignored."""

    def connect(self, export: bytes) -> Peer:
        """TransportUnavailable, with the reason for each way that was tried; DocumentError for a malformed export."""

    def close(self) -> None:
        """Give everything back; may be called again."""


class WritesOnly:
    """For ways that can't take runs as they lie."""

    moves = False

    def move(self, source: Addresses, target: Addresses, lengths: U64, timeout_s: float) -> None:
        raise TransportError("this way writes into landing slots only; use nixl or process_vm, or landing='slots'")

    def slot_at(self, address: Address, nbytes: int) -> Address:
        raise TransportError("this way writes into landing slots only; use nixl or process_vm, or landing='slots'")


class Memory(Protocol):
    """A worker's pages, wherever they are: `HostMemory`, or `TorchMemory` for tensors on a device."""

    @property
    def spans(self) -> Sequence[Bytes]:
        """The bytes that this process can address itself; none where pages are on a device."""

    def gather(self, copies: DenseCopies, out: Bytes) -> None:
        """Pages → dense chunk."""

    def scatter(self, copies: DenseCopies, chunk: Bytes) -> None:
        """Dense chunk → pages. When this returns, whoever reads them finds it."""

    def runs(self, copies: DenseCopies) -> Runs:
        """Where a chunk's bytes are, as this process addresses them."""


class Outbox:
    """Memory that chunks are gathered into before they leave. Buffers are used again: fresh ones cost page faults."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self._closed = False

    @contextmanager
    def filled(self, nbytes: int, fill: Fill) -> Iterator[Bytes]:
        """`nbytes` bytes, filled. As many buffers are made as are used at once."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = self._make()
        try:
            fill(buffer[:nbytes])
            yield buffer[:nbytes]
        finally:
            with self._lock:
                closed = self._closed
                if not closed:
                    self._free.append(buffer)
            if closed:
                self._drop(buffer)

    def close(self) -> None:
        """Buffers go when they are free."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for buffer in free:
            self._drop(buffer)

    def _make(self) -> Bytes:
        return np.empty(self._nbytes, np.uint8)

    def _drop(self, buffer: Bytes) -> None:
        """The buffer is not used again."""


def open_transport(
    name: str, staging: Staging, host: str = "127.0.0.1", *, pages: Sequence[Bytes] = (), pages_open: bool = False
) -> Transport:
    """`name`: shm, process_vm, tcp, nixl, local (the first two) or auto (all): what is offered and what may be used.

    `host` is bound by tcp; the caller sees to it that it is on loopback where peers aren't known by their keys.
    `pages`: memory that `move` may take bytes from. `pages_open`: peers may write there too, beside the staging memory;
    only ways that can do that are offered then. MissingExtra where `nixl` is asked for and not installed.
    """
    from kvferry.transport.select import SelectingTransport

    return SelectingTransport(name, staging, host, pages, pages_open)
