"""Same host, without shared memory: `process_vm_writev(2)` into the peer's landing slots.

Needs no help from the peer, and a call has ended when it returns. A process id can be used again by a stranger, so we
hold a pidfd, compare the start time, and read the peer's nonce through the very call that will write.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from functools import lru_cache

import msgspec
import numpy as np

from kvferry.errors import AddressError, TransportError, TransportUnavailable
from kvferry.layout.address import U64, Address, Addresses
from kvferry.layout.document import encode_msgpack
from kvferry.transport.base import read_export
from kvferry.transport.memory import Bytes
from kvferry.transport.staging import NONCE_BYTES, Staging


class VmExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int
    start_ticks: int
    nonce: bytes
    header: Address
    slots: Address
    nbytes: int
    base: Address


class ProcessVm:
    name = "process_vm"

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def export(self) -> bytes:
        s, pid = self._staging, os.getpid()
        slots = Address(int(s.view(0).__array_interface__["data"][0]))
        return encode_msgpack(VmExport(pid, start_ticks(pid), s.nonce, s.header_address, slots, s.nbytes, s.base))

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        """The kernel checks no grant: the session checks it before it scatters."""

    def revoke(self, grant: bytes) -> None:
        """See `grant`: a write that is under way ends in the slot, so the session quarantines the slot."""

    def connect(self, export: bytes) -> VmPeer:
        card = read_export(export, VmExport)
        try:
            pidfd = os.pidfd_open(card.pid)
        except OSError as error:
            raise TransportUnavailable(
                f"no process {card.pid} here: {error.strerror} (another host or container?)"
            ) from None
        try:
            nonce = np.zeros(NONCE_BYTES, np.uint8)
            if start_ticks(card.pid) != card.start_ticks:
                raise TransportUnavailable(f"process {card.pid} was started at another time: its id was used again")
            _call("process_vm_readv", card.pid, nonce, card.header)
            if nonce.tobytes() != card.nonce:
                raise TransportUnavailable(f"process {card.pid} has another nonce: the peer was restarted")
        except (OSError, TransportError) as error:
            os.close(pidfd)
            if isinstance(error, TransportUnavailable):
                raise
            raise TransportUnavailable(f"can't read memory of process {card.pid}: {error}") from None
        return VmPeer(card, pidfd)

    def close(self) -> None:
        """Nothing to close: the peer's kernel calls need nothing of ours."""


class VmPeer:
    name = "process_vm"
    reason = "same host, the kernel copies between the two processes"

    def __init__(self, card: VmExport, pidfd: int) -> None:
        self._card = card
        self._pidfd = pidfd

    def slot(self, address: Address, nbytes: int) -> None:
        return None

    def write(self, address: Address, grant: bytes, data: Bytes, timeout_s: float) -> None:
        card = self._card
        try:
            offset = Addresses([address]).offsets_in(card.base, card.nbytes, data.nbytes, "landing memory")
        except AddressError as error:
            raise TransportError(str(error)) from None
        self._check_alive()
        _call("process_vm_writev", card.pid, data, card.slots.plus(int(offset[0])))
        # the id can't have been used again while the process was seen alive on both sides of the call
        self._check_alive()

    def _check_alive(self) -> None:
        if self._pidfd < 0:
            raise TransportError("the way to this peer is closed")
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if poller.poll(0):
            raise TransportError(f"process {self._card.pid} has ended")

    def close(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def start_ticks(pid: int) -> int:
    """When the process was started, in clock ticks since boot: field 22 of /proc/<pid>/stat."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError as error:
        raise TransportError(f"process {pid} has ended: {error.strerror}") from None


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        function = getattr(libc, name)
        function.restype = ctypes.c_ssize_t
        function.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
    return libc


def _call(name: str, pid: int, local: Bytes, remote: Address) -> None:
    """Copy between the local array and `remote` in process `pid`, to the last byte."""
    done = 0
    while done < local.nbytes:
        part = local[done:]
        here = _iovecs(Address(int(part.__array_interface__["data"][0])), part.nbytes)
        there = _iovecs(remote.plus(done), part.nbytes)
        moved = getattr(_libc(), name)(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if moved <= 0:
            raise TransportError(_problem(name, pid, ctypes.get_errno()))
        done += moved


def _iovecs(address: Address, nbytes: int) -> U64:
    """One iovec (address, length) as the kernel reads it: two unsigned 64-bit words."""
    return np.array([[address.value, nbytes]], dtype=np.uint64)


def _problem(name: str, pid: int, code: int) -> str:
    advice = {
        errno.EPERM: "another user or container, or kernel.yama.ptrace_scope forbids it",
        errno.ESRCH: "the process has ended",
        errno.EFAULT: "the memory is not mapped there any more",
    }.get(code, "")
    return f"{name} to process {pid}: {os.strerror(code)}{f' ({advice})' if advice else ''}"
