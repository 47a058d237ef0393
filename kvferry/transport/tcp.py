"""TCP: the transport that always works. The receiver checks grant and bounds before a byte is written, and writes
nothing after a revoke.

Frame: header (magic, version, address, bytes, grant) and the data. Answer: magic, status, text. One connection per
peer, one write at a time on it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

import msgspec

from kvferry.errors import AddressError, TransportError, TransportUnavailable
from kvferry.layout.address import Address, Addresses
from kvferry.layout.document import encode_msgpack
from kvferry.transport.base import read_export
from kvferry.transport.memory import Bytes
from kvferry.transport.staging import Staging

MAGIC = b"KVFT"
VERSION = 1
GRANT_BYTES = 16
HEADER = struct.Struct(f"!4sHxxQQ{GRANT_BYTES}s")
ANSWER = struct.Struct("!4sHH")
PIECE_BYTES = 256 << 10
CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 60.0
"""A sender that stays silent in the middle of a frame for this long loses its connection, never more."""


class TcpExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    port: int
    base: Address
    nbytes: int


@dataclass
class Granted:
    slot: int
    nbytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    revoked: bool = False


class Tcp:
    """Listens on `host` (one port, chosen by the system) and writes what arrives into granted slots only."""

    name = "tcp"

    def __init__(self, staging: Staging, host: str = "127.0.0.1") -> None:
        self._staging = staging
        self._grants: dict[bytes, Granted] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._listener = socket.create_server((host, 0))
        self._host, self._port = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="kvferry-tcp-accept", daemon=True)
        self._acceptor.start()

    def export(self) -> bytes:
        return encode_msgpack(TcpExport(self._host, self._port, self._staging.base, self._staging.nbytes))

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        with self._lock:
            self._grants[grant] = Granted(slot, nbytes)

    def revoke(self, grant: bytes) -> None:
        with self._lock:
            granted = self._grants.pop(grant, None)
        if granted is not None:
            with granted.lock:  # a piece that is being received ends first
                granted.revoked = True

    def connect(self, export: bytes) -> TcpPeer:
        card = read_export(export, TcpExport)
        try:
            connection = _connect(card)
        except OSError as error:
            raise TransportUnavailable(f"can't connect to {card.host}:{card.port}: {error}") from None
        return TcpPeer(card, connection)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = dict(self._connections)
        for socket_ in (self._listener, *connections):
            with contextlib.suppress(OSError):
                socket_.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._acceptor, *connections.values()):
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors, say: others may close theirs
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="kvferry-tcp", daemon=True)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Receive frames until the peer leaves or sends something wrong; either ends this connection only."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while header := _receive_exactly(connection, HEADER.size):
                problem = self._receive_frame(connection, header)
                text = problem.encode()[:1000]
                connection.sendall(ANSWER.pack(MAGIC, 1 if problem else 0, len(text)) + text)
                if problem:
                    return
        except OSError:
            return
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _receive_frame(self, connection: socket.socket, header: bytes) -> str:
        """Receive one frame into its slot; returns what is wrong with it, or nothing."""
        magic, version, address, nbytes, grant = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            return f"not a kvferry frame of version {VERSION}"
        with self._lock:
            granted = self._grants.get(grant)
        if granted is None:
            return "this grant is unknown or was revoked"
        try:
            offset = Addresses([Address(address)]).offsets_in(
                self._staging.address(granted.slot), granted.nbytes, nbytes, "the granted slot"
            )
        except AddressError as error:
            return str(error)
        start = int(offset[0])
        room = self._staging.view(granted.slot)[start : start + nbytes].data
        return _receive_into(connection, room, granted)


def _receive_into(connection: socket.socket, room: memoryview, granted: Granted) -> str:
    """Fill `room` piece by piece, each under the grant's lock, so that nothing lands after a revoke has returned."""
    done = 0
    while done < len(room):
        if not select.select([connection], [], [], STALL_TIMEOUT_S)[0]:
            return f"no data for {STALL_TIMEOUT_S} s in the middle of a frame"
        with granted.lock:
            if granted.revoked:
                return "the grant was revoked"
            count = connection.recv_into(room[done : done + PIECE_BYTES])  # data is there: doesn't block
        if not count:
            raise ConnectionError("the sender left in the middle of a frame")
        done += count
    return "the grant was revoked" if granted.revoked else ""


class TcpPeer:
    name = "tcp"
    reason = "works everywhere"

    def __init__(self, card: TcpExport, connection: socket.socket) -> None:
        self._card = card
        self._lock = threading.Lock()
        self._connection: socket.socket | None = connection
        self._closed = False

    def slot(self, address: Address, nbytes: int) -> None:
        return None

    def write(self, address: Address, grant: bytes, data: Bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._closed:
                raise TransportError("the way to this peer is closed")
            try:
                if self._connection is None:
                    self._connection = _connect(self._card)
                status, text = _exchange(self._connection, address, grant, data, deadline)
            except OSError as error:
                self._drop()
                raise TransportError(f"tcp to {self._card.host}:{self._card.port}: {error or 'timed out'}") from None
            if status:
                self._drop()  # the receiver closes after a refusal
                raise TransportError(f"tcp to {self._card.host}:{self._card.port}: refused: {text}")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        self._closed = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a write that is under way
        with self._lock:
            self._drop()


def _connect(card: TcpExport) -> socket.socket:
    connection = socket.create_connection((card.host, card.port), timeout=CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _exchange(
    connection: socket.socket, address: Address, grant: bytes, data: Bytes, deadline: float
) -> tuple[int, str]:
    """Send one frame and read its answer: (status, text). OSError, TimeoutError included, where it doesn't come."""
    if len(grant) != GRANT_BYTES:
        raise TransportError(f"a grant has {GRANT_BYTES} bytes, got {len(grant)}")
    _set_timeout(connection, deadline)
    connection.sendall(HEADER.pack(MAGIC, VERSION, address.value, data.nbytes, grant))
    room = data.data
    for start in range(0, len(room), PIECE_BYTES):
        _set_timeout(connection, deadline)
        try:
            connection.sendall(room[start : start + PIECE_BYTES])
        except (BrokenPipeError, ConnectionResetError):
            break  # refused early: the answer may say why
    _set_timeout(connection, deadline)
    answer = _receive_exactly(connection, ANSWER.size)
    if not answer:
        raise ConnectionError("the receiver left without an answer")
    magic, status, length = ANSWER.unpack(answer)
    if magic != MAGIC:
        raise ConnectionError("the answer is not kvferry's")
    return status, _receive_exactly(connection, length).decode(errors="replace")


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Read `nbytes` bytes; empty where the peer left before the first."""
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(nbytes - len(parts))
        if not part:
            if parts:
                raise ConnectionError("the peer left in the middle of a message")
            return b""
        parts += part
    return bytes(parts)
