"""The contract of a transport: move one contiguous chunk into a landing slot of a peer, and know when it is there.

A transport knows bytes and slots; it never hears of heads, layers or pages. Target side: `export`, `grant`, `revoke`.
Source side: `connect`, then `Peer.write`. No order is promised between writes. After a TransportError it is unknown
whether bytes arrived.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.errors import TransportError
from kvferry.layout.address import Address
from kvferry.transport.memory import Bytes
from kvferry.transport.staging import Staging

NAMES = ("auto", "local", "shm", "process_vm", "tcp")


class Peer(Protocol):
    """A way into one peer's landing slots."""

    @property
    def name(self) -> str:
        """The transport that moves the bytes, such as `shm`."""

    @property
    def reason(self) -> str:
        """Why this one was chosen."""

    def write(self, address: Address, grant: bytes, data: Bytes, timeout_s: float) -> None:
        """Write `data` to `address` in the peer's slots. Blocks; on return the bytes are visible to the peer.
        TransportError otherwise.
        """

    def slot(self, address: Address, nbytes: int) -> Bytes | None:
        """The peer's slot as memory of this process, where the transport can; then gather straight into it instead of
        `write`.
        """

    def close(self) -> None: ...


class Transport(Protocol):
    """One endpoint's end of a transport."""

    @property
    def name(self) -> str: ...

    def export(self) -> bytes:
        """What a peer needs to reach our slots; opaque MessagePack, checked by `connect` on the other side."""

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        """Let a writer that shows `grant` write the first `nbytes` bytes of `slot`."""

    def revoke(self, grant: bytes) -> None:
        """On return, no write under `grant` is accepted any more, as far as this transport checks writes (see its
        fence table).
        """

    def connect(self, export: bytes) -> Peer:
        """Open a way to the peer that made `export`; TransportUnavailable, with the reason, where there is none."""

    def close(self) -> None: ...


def open_transport(name: str, staging: Staging, host: str = "127.0.0.1") -> Transport:
    """Open `auto` (the fastest that works between two processes), `local` (same host), `shm`, `process_vm` or `tcp`."""
    from kvferry.transport.auto import FirstThatWorks
    from kvferry.transport.process_vm import ProcessVm
    from kvferry.transport.shm import SharedMemory
    from kvferry.transport.tcp import Tcp

    if name == "shm":
        return SharedMemory(staging)
    if name == "process_vm":
        return ProcessVm(staging)
    if name == "tcp":
        return Tcp(staging, host)
    if name == "local":
        return FirstThatWorks(name, [SharedMemory(staging), ProcessVm(staging)])
    if name == "auto":
        return FirstThatWorks(name, [SharedMemory(staging), ProcessVm(staging), Tcp(staging, host)])
    raise TransportError(f"unknown transport {name!r}: expected one of {', '.join(NAMES)}")
