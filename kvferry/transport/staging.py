"""Landing memory: the only memory of a target that peers can write, cut into slots.

It is an anonymous file (memfd) mapped into this process. It has no name anywhere, so nothing stays when its processes
end, however they end. Before the slots lies a header page with a random key, by which a peer knows that it has found
this memory and not that of a process which got the same id later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Annotated

import msgspec
import numpy as np

from kvferry.errors import DocumentError, TransportError
from kvferry.layout.address import Address
from kvferry.layout.document import Struct
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import host_address

HEADER_BYTES = 4096
MAGIC = b"kvferry1"
KEY_BYTES = 16
PROBE_OFFSET = 64
"""Where in the header a peer writes the key when it tries whether it can."""
_ALIGN = 4096
_LIMIT = 1 << 48
Size = Annotated[int, msgspec.Meta(ge=1, le=_LIMIT)]


class Slots(Struct, frozen=True):
    """Slot i has `slot_bytes` bytes at `base` + i · `stride_bytes`; `base` may be an emulated address."""

    base: Address
    slots: Size
    slot_bytes: Size
    stride_bytes: Size

    @property
    def total_bytes(self) -> int:
        return self.slots * self.stride_bytes

    def check(self) -> None:
        """DocumentError where the numbers contradict each other."""
        if self.slot_bytes > self.stride_bytes or self.total_bytes > _LIMIT or not self.base.spans(self.total_bytes):
            raise DocumentError("slots", f"{self.slots} slots of {self.slot_bytes} bytes don't fit at {self.base}")

    def address(self, slot: int) -> Address:
        if not 0 <= slot < self.slots:
            raise TransportError(f"slot {slot} of {self.slots} slots")
        return self.base.plus(slot * self.stride_bytes)

    def place(self, address: Address, nbytes: int) -> tuple[int, int]:
        """(slot, offset in the slot) of a range that lies in one slot; TransportError for every other range."""
        if address.value >= self.base.value:
            slot, offset = divmod(address.distance_from(self.base), self.stride_bytes)
            if slot < self.slots and 0 <= nbytes <= self.slot_bytes and offset <= self.slot_bytes - nbytes:
                return slot, offset
        raise TransportError(f"{address} + {nbytes} bytes is in no slot of {self.slot_bytes} bytes from {self.base}")


class Staging:
    """`slots` landing slots of `slot_bytes` bytes. `base`: pretend that they lie there (an emulated device)."""

    ways = ("shm", "process_vm", "nixl", "tcp")
    """Transports that can write there."""

    def __init__(self, slots: int, slot_bytes: int, base: Address | None = None) -> None:
        for name, value in (("slots", slots), ("slot_bytes", slot_bytes)):
            if not 1 <= value <= _LIMIT:
                raise DocumentError(name, f"must be in 1 … 2**48, got {value}")
        stride = -(-slot_bytes // _ALIGN) * _ALIGN
        self.key = secrets.token_bytes(KEY_BYTES)
        self.file_bytes = HEADER_BYTES + slots * stride
        self.fd = os.memfd_create("kvferry-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.file_bytes)
            # a peer can't shrink it under us, which would end this process with SIGBUS
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._bytes: Bytes | None = map_file(self.fd, self.file_bytes)
            self._bytes[: len(MAGIC + self.key)] = np.frombuffer(MAGIC + self.key, np.uint8)
            self.host_address = host_address(self._bytes)
            self.layout = Slots(base or self.host_address.plus(HEADER_BYTES), slots, slot_bytes, stride)
            self.layout.check()
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def slots(self) -> int:
        return self.layout.slots

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    @property
    def memory(self) -> Bytes:
        """Header page and slots."""
        if self._bytes is None:
            raise TransportError("the staging memory is closed")
        return self._bytes

    def view(self, slot: int) -> Bytes:
        """The bytes of a slot. The memory stays mapped as long as such a view lives."""
        self.layout.address(slot)
        return slot_view(self.memory, self.layout, slot)

    def address(self, slot: int) -> Address:
        """What peers call the first byte of a slot."""
        return self.layout.address(slot)

    def buffer(self, nbytes: int) -> Bytes:
        """Memory of the same kind for a chunk that leaves from here."""
        return np.empty(nbytes, np.uint8)

    def close(self) -> None:
        """Give the memory back; may be called again."""
        if self._bytes is None:
            return
        self._bytes = None
        os.close(self.fd)


def slot_view(file: Bytes, layout: Slots, slot: int) -> Bytes:
    start = HEADER_BYTES + slot * layout.stride_bytes
    return file[start : start + layout.slot_bytes]


def map_file(fd: int, nbytes: int) -> Bytes:
    """The file in memory. It is unmapped when the last view of it is gone, so never under its user."""
    # filled at once: the first transfer doesn't pay for page faults
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapping, np.uint8)
