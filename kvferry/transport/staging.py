"""Landing memory: the only memory that a target lets its peers write, cut into slots."""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np

from kvferry.errors import TransportError
from kvferry.layout.address import Address
from kvferry.transport.memory import Bytes

HEADER_BYTES = mmap.PAGESIZE
NONCE_BYTES = 16


class Staging:
    """`slots` × `slot_bytes` of shared memory without a name, so that even `kill -9` leaves nothing behind.

    It begins with a header page that holds a random nonce: a peer that maps it, or reads it by process id, compares
    the nonce and so never mistakes another process for us. `base` gives the slots an emulated device address; by
    default they have their real one.
    """

    def __init__(self, slots: int, slot_bytes: int, base: Address | None = None) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.file_bytes = HEADER_BYTES + slots * slot_bytes
        self.fd = os.memfd_create("kvferry-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.file_bytes)
            self._map = mmap.mmap(self.fd, self.file_bytes)
        except OSError as error:
            os.close(self.fd)
            raise TransportError(
                f"no memory for {slots} landing slots of {slot_bytes} bytes: {error}; use fewer or smaller slots"
            ) from None
        self._map[:NONCE_BYTES] = self.nonce
        whole = np.frombuffer(self._map, np.uint8)
        self.header_address = Address(int(whole.__array_interface__["data"][0]))
        self._bytes: Bytes | None = whole[HEADER_BYTES:]
        self.base = self.header_address.plus(HEADER_BYTES) if base is None else base
        self.inode = os.fstat(self.fd).st_ino

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def address(self, slot: int) -> Address:
        """Where peers write slot `slot`, in the address space of `base`."""
        return self.base.plus(slot * self.slot_bytes)

    def view(self, slot: int) -> Bytes:
        """The slot's bytes in this process."""
        if self._bytes is None:
            raise TransportError("the landing memory is closed")
        if not 0 <= slot < self.slots:
            raise TransportError(f"slot {slot} is not one of {self.slots}")
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def close(self) -> None:
        """Give the memory back. Peers that still map it keep their own mapping, which nobody reads any more."""
        if self._bytes is None:
            return
        self._bytes = None
        os.close(self.fd)
        try:
            self._map.close()
        except BufferError:  # a view is still in somebody's hands; the mapping goes when the last one does
            pass
