"""Two processes on one host: the target's staging mapped here (shm), or written by `process_vm_writev`.

Neither needs anything to run at the target, and the target can refuse nothing: only staging memory is ever offered.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import time
from functools import cache
from typing import Any

import numpy as np

from kvferry.errors import TransportError, TransportUnavailable
from kvferry.layout.address import U64, Address, Addresses
from kvferry.transport.base import Export, Fill, LinkClosed, LocalCard, Outbox, WritesOnly
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import host_address
from kvferry.transport.process import ProcessWatch, start_ticks
from kvferry.transport.staging import HEADER_BYTES, KEY_BYTES, MAGIC, PROBE_OFFSET, Staging, map_file, slot_view

IOVECS = 1024
"""Most runs that one system call takes (IOV_MAX)."""


def local_card(staging: Staging) -> LocalCard:
    pid = os.getpid()
    inode = os.fstat(staging.fd).st_ino
    return LocalCard(pid, start_ticks(pid), staging.fd, inode, staging.file_bytes, staging.host_address)


class ShmPeer(WritesOnly):
    """The target's staging mapped into this process."""

    name = "shm"
    reason = ""

    def __init__(self, export: Export, card: LocalCard) -> None:
        self._slots = export.slots
        self._watch = ProcessWatch(card.pid, card.start_ticks)
        try:
            fd = _open_memory(card, _file_bytes(export, card))
            try:
                self._bytes: Bytes | None = map_file(fd, card.file_bytes)
            finally:
                os.close(fd)
            if self._bytes[: len(MAGIC + export.key)].tobytes() != MAGIC + export.key:
                raise TransportUnavailable("the memory found there has another key")
            self._bytes[PROBE_OFFSET : PROBE_OFFSET + KEY_BYTES] = np.frombuffer(export.key, np.uint8)
            self._watch.check()
        except (OSError, ValueError) as error:
            self.close()
            raise TransportUnavailable(f"the staging of process {card.pid} can't be mapped: {error}") from None
        except BaseException:
            self.close()
            raise

    def write(self, address: Address, grant: bytes, nbytes: int, fill: Fill, timeout_s: float) -> None:
        slot, offset = self._slots.place(address, nbytes)
        self._watch.check()
        file = self._bytes
        if file is None:
            raise LinkClosed("the connection is closed")
        fill(slot_view(file, self._slots, slot)[offset : offset + nbytes])
        self._watch.check()

    def close(self) -> None:
        self._watch.close()
        self._bytes = None


def _file_bytes(export: Export, card: LocalCard) -> int:
    if card.file_bytes != HEADER_BYTES + export.slots.total_bytes:
        raise TransportUnavailable(f"the export says {card.file_bytes} bytes, its slots need another size")
    return card.file_bytes


def _open_memory(card: LocalCard, nbytes: int) -> int:
    """Open the file that the other process has as `card.fd`, if it is what the card says."""
    path = f"/proc/{card.pid}/fd/{card.fd}"
    # looked at before it is opened: opening a pipe or a device could block or do something
    _check_file(os.stat(path), card, nbytes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_file(os.fstat(fd), card, nbytes)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportUnavailable("the memory found there can shrink, which would end this process")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_file(found: os.stat_result, card: LocalCard, nbytes: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_ino != card.inode or found.st_size != nbytes:
        raise TransportUnavailable(
            f"file {card.fd} of process {card.pid} is not the staging memory: inode {found.st_ino} and "
            f"{found.st_size} bytes, expected inode {card.inode} and {nbytes} bytes"
        )


class ProcessVmPeer:
    """The target's staging, written by system calls that name its process."""

    name = "process_vm"
    reason = ""
    moves = True

    def __init__(self, export: Export, card: LocalCard) -> None:
        self._slots = export.slots
        self._outbox = Outbox(export.slots.slot_bytes)
        if not card.address.spans(_file_bytes(export, card)):
            raise TransportUnavailable(f"the staging at {card.address} passes 2**64")
        self._watch = ProcessWatch(card.pid, card.start_ticks)
        self._card = card
        try:
            found = np.zeros(len(MAGIC + export.key), np.uint8)
            self._move("process_vm_readv", found, card.address, None)
            if found.tobytes() != MAGIC + export.key:
                raise TransportUnavailable("the memory found there has another key")
            key = np.frombuffer(export.key, np.uint8)
            self._move("process_vm_writev", key, card.address.plus(PROBE_OFFSET), None)
        except TransportError as error:
            self.close()
            raise TransportUnavailable(str(error)) from None
        except BaseException:
            self.close()
            raise

    def write(self, address: Address, grant: bytes, nbytes: int, fill: Fill, timeout_s: float) -> None:
        remote = self.slot_at(address, nbytes)
        deadline_s = time.monotonic() + timeout_s
        with self._outbox.filled(nbytes, fill) as data:
            self._move("process_vm_writev", data, remote, deadline_s)

    def move(self, source: Addresses, target: Addresses, lengths: U64, timeout_s: float) -> None:
        self._watch.check()
        move_runs("process_vm_writev", self._watch.pid, source, target, lengths, time.monotonic() + timeout_s)
        self._watch.check()

    def slot_at(self, address: Address, nbytes: int) -> Address:
        slot, offset = self._slots.place(address, nbytes)
        return self._card.address.plus(HEADER_BYTES + slot * self._slots.stride_bytes + offset)

    def close(self) -> None:
        self._watch.close()

    def _move(self, call: str, data: Bytes, remote: Address, deadline_s: float | None) -> None:
        lengths = np.array([data.nbytes], np.uint64)
        # the system call takes a process id: looked at before and after, it was our process's all the time
        self._watch.check()
        move_runs(call, self._watch.pid, Addresses([host_address(data)]), Addresses([remote]), lengths, deadline_s)
        self._watch.check()


def move_runs(
    call: str, pid: int, local: Addresses, remote: Addresses, lengths: U64, deadline_s: float | None = None
) -> None:
    """`process_vm_writev` (local → remote) or `process_vm_readv` of many runs; both sides have the same lengths.

    TransportError with the reason; runs before the failing one have then been moved.
    """
    function = _system_call(call)
    some = np.flatnonzero(lengths)
    local, remote, lengths = local.take(some), remote.take(some), lengths[some]
    row, done = 0, np.uint64(0)  # runs moved, and bytes moved of the next one
    while row < len(lengths):
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TransportError(f"{call} to process {pid}: out of time after {row} of {len(lengths)} runs")
        rows = slice(row, row + IOVECS)
        left, skip = lengths[rows].copy(), np.zeros(len(lengths[rows]), np.uint64)
        left[0] -= done
        skip[0] = done
        here, there = _iovecs(local.take(rows).plus(skip), left), _iovecs(remote.take(rows).plus(skip), left)
        moved = function(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if moved <= 0:
            raise TransportError(f"{call} to process {pid}: {_explain(ctypes.get_errno())}")
        ends = np.cumsum(left, dtype=np.uint64)
        whole = int(np.searchsorted(ends, np.uint64(moved), side="right"))
        done = np.uint64(moved) - ends[whole - 1] if whole else done + np.uint64(moved)
        row += whole


def _iovecs(addresses: Addresses, lengths: U64) -> U64:
    return np.ascontiguousarray(np.stack([addresses.u64, lengths], axis=1))


def _explain(error: int) -> str:
    hints = {
        1: "another user, namespace, or a setting of the system (Yama) forbids it",
        3: "the process has ended",
        14: "an address is not mapped there",
    }
    return f"{os.strerror(error)}; {hints[error]}" if error in hints else os.strerror(error)


@cache
def _system_call(name: str) -> Any:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        raise TransportUnavailable(f"this system has no {name}") from None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    function.restype = ctypes.c_ssize_t
    return function
