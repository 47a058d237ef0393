"""Frames over TCP: the receiver checks each one before a byte of it reaches the staging memory.

A connection says hello with the key of the export, so that nobody writes to a port that has changed hands. Then it
sends frames: header, bytes, and waits for the reply. A frame that is refused ends its connection and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from dataclasses import dataclass

from kvferry.errors import CutOff, TransportError, TransportUnavailable
from kvferry.layout.address import Address
from kvferry.transport.base import Export, Fill, LinkClosed, Outbox, TcpCard, WritesOnly
from kvferry.transport.copies import Bytes
from kvferry.transport.hosts import is_loopback, machine_address
from kvferry.transport.staging import Staging

LOG = logging.getLogger("kvferry.transport")
VERSION = 1
HELLO, WRITE = 0, 1
GRANT_BYTES_MAX = 32
HEADER = struct.Struct("!4sHBBQQ32s")  # magic, version, kind, bytes of the grant, address, length, grant
FRAME_MAGIC = b"kvfF"
REPLY = struct.Struct("!4sBH")  # magic, 1 = done, bytes of the reason that follows
REPLY_MAGIC = b"kvfR"
MAX_CONNECTIONS = 1024
CONNECT_S = 5.0
LINGER_S = 1.0
"""How long a refused sender is listened to, so that it can read the reason before its connection breaks."""


class _Refused(Exception):
    """The frame breaks the rules; the text goes to the sender."""


@dataclass
class _Grant:
    slot: int
    nbytes: int
    busy: socket.socket | None = None
    revoked: bool = False


class Receiver:
    """The target's side: one thread waits for connections, one more for each connection; waiting costs nothing."""

    def __init__(self, staging: Staging, host: str = "127.0.0.1") -> None:
        self._staging = staging
        self._changed = threading.Condition()
        self._grants: dict[bytes, _Grant] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._stop = threading.Event()
        self._listener = socket.create_server((_ipv4(host), 0), backlog=128)
        self.card = TcpCard(*self._listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._accept, name="kvferry-tcp-accept", daemon=True)
        self._thread.start()

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        self._staging.address(slot)  # raises where there is no such slot
        if not 1 <= len(grant) <= GRANT_BYTES_MAX:
            raise TransportError(f"a grant has 1 … {GRANT_BYTES_MAX} bytes, got {len(grant)}")
        if not 0 <= nbytes <= self._staging.slot_bytes:
            raise TransportError(f"{nbytes} bytes granted in a slot of {self._staging.slot_bytes}")
        with self._changed:
            if grant in self._grants:
                raise TransportError("this grant is in use already")
            self._grants[grant] = _Grant(slot, nbytes)

    def revoke(self, grant: bytes) -> None:
        with self._changed:
            entry = self._grants.pop(grant, None)
            if entry is None:
                return
            entry.revoked = True
            if entry.busy is not None:
                _shut(entry.busy)
                # the receiving thread is woken by the shutdown: this waits for one recv call at most
                self._changed.wait_for(lambda: entry.busy is None)

    def close(self) -> None:
        with self._changed:
            self._stop.set()
            _shut(self._listener)
            for connection in self._connections:
                _shut(connection)
            threads = [self._thread, *self._connections.values()]
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._stop.is_set():
                    LOG.warning("can't accept a connection: %s", error)
                self._stop.wait(0.1)  # no busy loop where descriptors have run out
                continue
            with self._changed:
                if self._stop.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="kvferry-tcp", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    LOG.warning("no thread for a connection: %s", error)
                    connection.close()
                    continue
                self._connections[connection] = thread

    def _serve(self, connection: socket.socket) -> None:
        try:
            _set_options(connection)
            connection.settimeout(CONNECT_S)  # a stranger who says nothing doesn't keep the thread
            self._greet(connection)
            connection.settimeout(None)
            while self._receive(connection):
                _reply(connection, "")
        except _Refused as refusal:
            LOG.warning("a frame was refused, its connection is closed: %s", refusal)
            with contextlib.suppress(OSError):
                _reply(connection, str(refusal))
                self._linger(connection)
        except OSError as error:
            LOG.info("a connection ended: %s", error)
            _reset(connection)
        except Exception:
            LOG.exception("a connection ended by an unexpected error")
        finally:
            with self._changed:
                self._connections.pop(connection, None)
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        header = bytearray(HEADER.size)
        if not _fill(connection, memoryview(header)):
            raise ConnectionResetError("closed before it said hello")
        kind, key, _, _ = _parse(header)
        if kind != HELLO or key != self._staging.key:
            raise _Refused("no hello with the key of this staging memory")
        _reply(connection, "")

    def _receive(self, connection: socket.socket) -> bool:
        """One frame into its slot; False where the connection ended before it."""
        header = bytearray(HEADER.size)
        if not _fill(connection, memoryview(header)):
            return False
        kind, key, address, nbytes = _parse(header)
        if kind != WRITE:
            raise _Refused(f"unknown frame kind {kind}")
        entry, place = self._claim(connection, key, address, nbytes)
        try:
            if nbytes and not _fill(connection, place.data, entry):
                raise ConnectionResetError("closed before the bytes came")
        finally:
            with self._changed:
                entry.busy = None
                self._changed.notify_all()
        return True

    def _claim(self, connection: socket.socket, grant: bytes, address: Address, nbytes: int) -> tuple[_Grant, Bytes]:
        """The one gate: the grant lives, nobody else writes under it, and the range is inside what it allows."""
        with self._changed:
            entry = self._grants.get(grant)
            if entry is None:
                raise _Refused("unknown or revoked grant")
            try:
                slot, offset = self._staging.layout.place(address, nbytes)
            except TransportError as error:
                raise _Refused(str(error)) from None
            if slot != entry.slot or nbytes > entry.nbytes or offset > entry.nbytes - nbytes:
                raise _Refused(
                    f"{address} + {nbytes} bytes is outside the grant of {entry.nbytes} bytes in slot {entry.slot}"
                )
            if entry.busy is not None:
                raise _Refused("somebody writes under this grant already")
            place = self._staging.view(slot)[offset : offset + nbytes]
            entry.busy = connection
            return entry, place

    def _linger(self, connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_WR)
        end_s, waste = time.monotonic() + LINGER_S, bytearray(1 << 16)
        while (left_s := end_s - time.monotonic()) > 0 and not self._stop.is_set():
            connection.settimeout(left_s)
            if not connection.recv_into(waste):
                return


class TcpPeer(WritesOnly):
    """The source's side: one connection, one write at a time. Once a write has failed it is of no further use."""

    name = "tcp"
    reason = ""

    def __init__(self, export: Export, card: TcpCard, own_host: str = "127.0.0.1") -> None:
        self._slots = export.slots
        self._outbox = Outbox(export.slots.slot_bytes)
        self._lock = threading.Lock()
        self._closed = False
        where = f"{card.host}:{card.port}"
        try:
            host = _ipv4(card.host, own_host)
            self._socket = socket.create_connection((host, card.port), timeout=CONNECT_S)
        except OSError as error:
            raise TransportUnavailable(f"can't connect to {where}: {error}") from None
        try:
            _set_options(self._socket)
            self._exchange(HELLO, export.key, Address(0), b"", time.monotonic() + CONNECT_S)
        except (OSError, TransportError) as error:
            self._socket.close()
            raise TransportUnavailable(f"{where} does not answer as the staging memory's owner: {error}") from None

    def write(self, address: Address, grant: bytes, nbytes: int, fill: Fill, timeout_s: float) -> None:
        self._slots.place(address, nbytes)  # the target checks again; this keeps the connection
        if not 1 <= len(grant) <= GRANT_BYTES_MAX:
            raise TransportError(f"a grant has 1 … {GRANT_BYTES_MAX} bytes, got {len(grant)}")
        deadline_s = time.monotonic() + timeout_s
        with self._outbox.filled(nbytes, fill) as data:
            self._put(address, grant, data, timeout_s, deadline_s)

    def _put(self, address: Address, grant: bytes, data: Bytes, timeout_s: float, deadline_s: float) -> None:
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise TransportError(f"write of {data.nbytes} bytes: earlier writes took all of its {timeout_s} s")
        try:
            if self._closed:
                raise LinkClosed("the connection is closed")
            self._exchange(WRITE, grant, address, data.data, deadline_s)
        except OSError as error:
            self._end()
            what = f"write of {data.nbytes} bytes to {address}"
            if isinstance(error, TimeoutError):
                raise TransportError(f"{what}: not done within {timeout_s} s") from None
            raise CutOff(f"{what}: the connection broke: {error}") from None
        except TransportError:
            self._end()
            raise
        finally:
            self._lock.release()

    def _end(self) -> None:
        self._closed = True
        self._socket.close()

    def close(self) -> None:
        _shut(self._socket)  # ends a write that is under way in another thread
        with self._lock:
            self._end()

    def _exchange(self, kind: int, grant: bytes, address: Address, data: bytes | memoryview, deadline_s: float) -> None:
        header = HEADER.pack(FRAME_MAGIC, VERSION, kind, len(grant), address.value, len(data), grant)
        self._limit(deadline_s)
        self._socket.sendall(header)
        if data:
            self._limit(deadline_s)
            self._socket.sendall(data)
        magic, done, count = REPLY.unpack(self._read(REPLY.size, deadline_s))
        if magic != REPLY_MAGIC:
            raise TransportError("the reply is not one of this protocol")
        reason = self._read(count, deadline_s).decode("utf-8", "replace")
        if done != 1:
            raise CutOff(f"refused by the target: {reason}")

    def _read(self, nbytes: int, deadline_s: float) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            self._limit(deadline_s)
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the target closed it")
            view = view[count:]
        return bytes(data)

    def _limit(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("out of time")
        self._socket.settimeout(left_s)


def _ipv4(host: str, own: str | None = None) -> str:
    """TransportUnavailable where it is not an address of one machine, or, seen from our own, on the other side of
    loopback: an endpoint that only this machine reaches writes to nothing else.
    """
    address = machine_address(host)
    if not address:
        raise TransportUnavailable(f"host {host!r}: tcp needs the IPv4 address of one machine")
    if own is not None and is_loopback(address) != is_loopback(own):
        raise TransportUnavailable(f"host {host!r}: one side is on loopback, the other not (this side is {own!r})")
    return address


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _parse(header: bytearray) -> tuple[int, bytes, Address, int]:
    magic, version, kind, grant_bytes, address, nbytes, grant = HEADER.unpack(header)
    if magic != FRAME_MAGIC or version != VERSION:
        raise _Refused(f"not a frame of this protocol, version {VERSION}: starts with {bytes(header[:6]).hex()}")
    if grant_bytes > GRANT_BYTES_MAX:
        raise _Refused(f"a grant of {grant_bytes} bytes")
    return kind, grant[:grant_bytes], Address(address), nbytes


def _fill(connection: socket.socket, view: memoryview, grant: _Grant | None = None) -> bool:
    """Receive until `view` is full; False where the connection was closed before the first byte."""
    total = len(view)
    while view:
        if grant is not None and grant.revoked:
            raise ConnectionResetError("the grant was revoked")
        count = connection.recv_into(view)
        if not count:
            if len(view) == total:
                return False
            raise ConnectionResetError("closed in the middle of a frame")
        view = view[count:]
    return True


def _reset(connection: socket.socket) -> None:
    """Close it so that the sender hears of it at once: one that waits for room in a full window might not otherwise."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _reply(connection: socket.socket, problem: str) -> None:
    text = problem.encode()[:1000]
    connection.sendall(REPLY.pack(REPLY_MAGIC, not problem, len(text)) + text)
