"""Same host, the landing slots mapped into the writer: the fastest way, gather goes straight into the peer's slot.

The peer's unnamed shared memory is opened through /proc/<pid>/fd/<fd> (same user) and recognised by inode, size and
nonce, so a process id that was used again can't deceive. A mapping, once made, is of that memory for ever, whatever
becomes of the process.
"""

from __future__ import annotations

import mmap
import os

import msgspec
import numpy as np

from kvferry.errors import AddressError, TransportError, TransportUnavailable
from kvferry.layout.address import Address, Addresses
from kvferry.layout.document import encode_msgpack
from kvferry.transport.base import read_export
from kvferry.transport.memory import Bytes
from kvferry.transport.staging import HEADER_BYTES, NONCE_BYTES, Staging


class ShmExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int
    fd: int
    inode: int
    file_bytes: int
    nonce: bytes
    base: Address


class SharedMemory:
    name = "shm"

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def export(self) -> bytes:
        s = self._staging
        return encode_msgpack(ShmExport(os.getpid(), s.fd, s.inode, s.file_bytes, s.nonce, s.base))

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        """Nothing checks a write to shared memory: the session checks the grant before it scatters."""

    def revoke(self, grant: bytes) -> None:
        """See `grant`: a writer that still maps the slot can write it, so the session quarantines the slot."""

    def connect(self, export: bytes) -> MappedPeer:
        card = read_export(export, ShmExport)
        path = f"/proc/{card.pid}/fd/{card.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportUnavailable(
                f"can't open {path}: {error.strerror} (another host, user or container?)"
            ) from None
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (card.inode, card.file_bytes) or card.file_bytes <= HEADER_BYTES:
                raise TransportUnavailable(f"{path} is not the peer's landing memory (another host or a new process?)")
            memory = mmap.mmap(fd, card.file_bytes)
        except OSError as error:
            raise TransportUnavailable(f"can't map {path}: {error.strerror}") from None
        finally:
            os.close(fd)
        if memory[:NONCE_BYTES] != card.nonce:
            memory.close()
            raise TransportUnavailable(f"{path} has another nonce: the peer was restarted")
        return MappedPeer(memory, card.base)

    def close(self) -> None:
        """Nothing of its own to close: the staging belongs to the endpoint."""


class MappedPeer:
    name = "shm"
    reason = "same host, the peer's landing slots are mapped here"

    def __init__(self, memory: mmap.mmap, base: Address) -> None:
        self._memory = memory
        self._base = base
        self._slots: Bytes | None = np.frombuffer(memory, np.uint8)[HEADER_BYTES:]

    def slot(self, address: Address, nbytes: int) -> Bytes:
        slots = self._slots
        if slots is None:
            raise TransportError("the way to this peer is closed")
        try:
            offset = int(Addresses([address]).offsets_in(self._base, slots.nbytes, nbytes, "landing memory")[0])
        except AddressError as error:
            raise TransportError(str(error)) from None
        return slots[offset : offset + nbytes]

    def write(self, address: Address, grant: bytes, data: Bytes, timeout_s: float) -> None:
        self.slot(address, data.nbytes)[:] = data

    def close(self) -> None:
        if self._slots is None:
            return
        self._slots = None
        try:
            self._memory.close()
        except BufferError:  # a gather still holds a view; the mapping goes with it
            pass
