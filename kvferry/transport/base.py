"""The contract of a transport: bytes into granted slots of a target's staging memory, and nothing else."""

from __future__ import annotations

from typing import Annotated, Literal, Optional, Protocol

import msgspec
import numpy as np

from kvferry.errors import TransportError
from kvferry.layout.address import Address
from kvferry.layout.document import Struct
from kvferry.transport.copies import Bytes
from kvferry.transport.staging import KEY_BYTES, Size, Slots, Staging

NAMES = ("auto", "local", "shm", "process_vm", "tcp")
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


class Export(Struct, frozen=True):
    """What a peer needs to reach our staging. A way that is not offered is None."""

    format: Literal["kvferry-transport/1"]
    slots: Slots
    key: Key
    shm: Optional[LocalCard] = None
    process_vm: Optional[LocalCard] = None
    tcp: Optional[TcpCard] = None


class Peer(Protocol):
    """A target that we can write to. Thread-safe."""

    name: str
    """The way that was chosen: shm, process_vm or tcp."""
    reason: str
    """Why, with what was tried before."""

    def write(self, address: Address, grant: bytes, data: Bytes, timeout_s: float) -> None:
        """Block until `data` is visible in the target's slot at `address`. TransportError: whether bytes arrived is
        unknown, and this peer may be of no further use.
        """

    def slot(self, address: Address, nbytes: int) -> Bytes | None:
        """The target's slot mapped into this process, to write into directly; None where that can't be."""

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


def check_data(data: Bytes) -> Bytes:
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise TransportError(f"only contiguous bytes can be written, got {data.dtype} values of shape {data.shape}")
    return data


def open_transport(name: str, staging: Staging, host: str = "127.0.0.1") -> Transport:
    """`name`: shm, process_vm, tcp, local (the first two) or auto (all): what is offered and what may be used.

    `host` is bound by tcp, loopback only.
    """
    from kvferry.transport.select import SelectingTransport

    return SelectingTransport(name, staging, host)
