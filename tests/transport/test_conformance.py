"""What every transport promises, between two real processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvferry.errors import DocumentError, TransportError, TransportUnavailable
from kvferry.layout.address import Address, Addresses
from kvferry.layout.document import decode_msgpack, encode_msgpack
from kvferry.transport.base import Export, Peer, TcpCard, Transport, open_transport
from kvferry.transport.copies import Bytes
from kvferry.transport.local import IOVECS, move_runs
from kvferry.transport.staging import Staging
from kvferry.transport.tcp import FRAME_MAGIC, HEADER, HELLO, REPLY, VERSION, WRITE
from tests.transport.installed import TRANSPORTS
from tests.transport.target import SLOT_BYTES, SLOTS, Target, pause, target

BASES = (None, 0xFFFF81AB54E01000, (1 << 63) - 4096, (1 << 64) - SLOTS * SLOT_BYTES, 4096)
GRANT = bytes(range(16))


_opened: list[tuple[Transport, Staging]] = []


@pytest.fixture(autouse=True)
def close_transports() -> Iterator[None]:
    yield
    for transport, staging in _opened:
        transport.close()
        staging.close()
    _opened.clear()


def open_peer(name: str, export: bytes) -> Peer:
    """A source; it is closed with the test."""
    staging = Staging(1, 4096)
    transport = open_transport(name, staging)
    _opened.append((transport, staging))
    return transport.connect(export)


def put(peer: Peer, address: Address, grant: bytes, data: Bytes, timeout_s: float) -> None:
    peer.write(address, grant, data.nbytes, lambda out: np.copyto(out, data), timeout_s)


def pattern(nbytes: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_bytes_arrive_at_any_address_and_nothing_else_changes(name: str, base: int | None) -> None:
    """F1: emulated device addresses with bit 63 set, and regions that end exactly at 2**64."""
    with target(name, base) as other:
        peer = open_peer(name, other.export)
        expected = np.full(SLOTS * SLOT_BYTES, 0xEE, np.uint8)
        for slot, (start, nbytes) in enumerate([(0, SLOT_BYTES), (1, 1), (4093, 3001)]):
            grant = bytes([slot]) * 16
            other.do("grant", grant, slot, SLOT_BYTES)
            data = pattern(nbytes, slot)
            put(peer, other.addresses[slot].plus(start), grant, data, 5.0)
            expected[slot * SLOT_BYTES + start : slot * SLOT_BYTES + start + nbytes] = data
        put(peer, other.addresses[2], grant, pattern(0), 5.0)
        assert other.do("read") == expected.tobytes()
        peer.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_writes_outside_the_landing_memory_are_refused(name: str) -> None:
    base = 0xFFFF81AB54E01000
    with target(name, base) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        before = other.do("read")
        peer = open_peer(name, other.export)
        last = other.addresses[0].plus(SLOTS * SLOT_BYTES - 8)
        for address in (last, Address(base - 8), Address(16), Address((1 << 64) - 8)):
            with pytest.raises(TransportError):
                put(peer, address, GRANT, pattern(16), 5.0)
        assert other.do("read") == before
        put(peer, other.addresses[0], GRANT, pattern(16), 5.0)  # a refusal doesn't spoil the way
        assert other.do("read")[:16] == pattern(16).tobytes()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_killed_peer_is_an_error_long_before_the_timeout(name: str) -> None:
    with target(name) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        peer = open_peer(name, other.export)
        other.kill()
        started = time.monotonic()
        with pytest.raises(TransportError):
            put(peer, other.addresses[0], GRANT, pattern(16), 30.0)
        with pytest.raises(TransportUnavailable):
            open_peer(name, other.export)
        assert time.monotonic() - started < 5


def test_f50_a_peer_killed_in_the_middle_of_a_write_is_an_error_soon() -> None:
    with target("tcp") as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        peer = open_peer("tcp", other.export)
        pid = other.process.pid
        assert pid is not None
        pause(pid)  # accepts no byte and gives no reply
        killer = threading.Timer(0.3, other.kill)
        killer.start()
        started = time.monotonic()
        with pytest.raises(TransportError, match="the connection broke"):
            put(peer, other.addresses[0], GRANT, pattern(SLOT_BYTES), 30.0)
        killer.join()
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("name", TRANSPORTS)
def test_threads_may_write_at_once(name: str) -> None:
    with target(name) as other:
        grants = [bytes([i]) * 16 for i in range(SLOTS)]
        for slot, grant in enumerate(grants):
            other.do("grant", grant, slot, SLOT_BYTES)
        peer = open_peer(name, other.export)

        def fill(slot: int) -> None:
            for start in range(0, SLOT_BYTES, 512):
                data = pattern(512, slot * 100 + start)
                put(peer, other.addresses[slot].plus(start), grants[slot], data, 10.0)

        threads = [threading.Thread(target=fill, args=(slot,)) for slot in range(SLOTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [pattern(512, s * 100 + start) for s in range(SLOTS) for start in range(0, SLOT_BYTES, 512)]
        assert other.do("read") == np.concatenate(expected).tobytes()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_f63_connects_leave_no_descriptor(name: str) -> None:
    with target(name) as other:
        open_peer(name, other.export).close()
        ours, theirs = len(os.listdir("/proc/self/fd")), other.do("count")
        staging = Staging(1, 4096)
        transport = open_transport(name, staging)
        for _ in range(200):
            transport.connect(other.export).close()
        transport.close()
        staging.close()
        deadline = time.monotonic() + 5
        while other.do("count") > theirs and time.monotonic() < deadline:
            time.sleep(0.05)
        assert other.do("count") <= theirs
        assert len(os.listdir("/proc/self/fd")) <= ours


@pytest.mark.parametrize("name", ["auto", "local", *TRANSPORTS])
def test_close_is_idempotent_and_ends_threads(name: str) -> None:
    before = threading.active_count()
    staging = Staging(2, 4096)
    transport = open_transport(name, staging)
    for _ in range(2):
        transport.close()
        staging.close()
    assert threading.active_count() == before


def test_auto_takes_the_first_that_works_and_says_why() -> None:
    with target("auto") as other:
        peer = open_peer("auto", other.export)
        assert (peer.name, peer.reason) == ("shm", "shm: works")
        assert open_peer("tcp", other.export).name == "tcp"  # one side may insist on another way
        moved = changed(other, process={"start_ticks": 1})
        peer = open_peer("auto", moved)
        assert peer.name == "tcp"
        assert peer.reason.startswith("shm: process ") and "process_vm: process " in peer.reason
        with pytest.raises(TransportUnavailable, match=r"over 'local': shm: .*; process_vm: "):
            open_peer("local", moved)
    with target("tcp") as other, pytest.raises(TransportUnavailable, match="shm: not offered by the peer"):
        open_peer("shm", other.export)


def changed(other: Target, process: dict[str, object] | None = None, **fields: object) -> bytes:
    """The target's export with some values that aren't true."""
    card = decode_msgpack(other.export, Export)
    if process is not None:
        for way in ("shm", "process_vm"):
            fields[way] = msgspec.structs.replace(getattr(card, way), **process)
    return encode_msgpack(msgspec.structs.replace(card, **fields))


@pytest.mark.parametrize("name", ["shm", "process_vm"])
def test_a_process_id_that_was_used_again_is_noticed(name: str) -> None:
    with target("local") as other:
        card = decode_msgpack(other.export, Export)
        assert card.shm is not None
        lies: list[bytes] = [
            changed(other, process={"start_ticks": card.shm.start_ticks + 1}),
            changed(other, process={"pid": 2**22 + 1}),
            changed(other, process={"file_bytes": card.shm.file_bytes + 4096}),
            changed(other, key=bytes(16)),
        ]
        if name == "shm":
            lies += [changed(other, process={"inode": 1}), changed(other, process={"fd": 0})]
        else:
            lies += [changed(other, process={"address": Address(at)}) for at in (4096, 0xFFFF81AB54E01000)]
        before = other.do("read")
        for lie in lies:
            with pytest.raises(TransportUnavailable):
                open_peer(name, lie)
        assert other.do("read") == before
        assert open_peer(name, other.export).name == name


def test_malformed_exports_are_refused() -> None:
    with target("auto") as other:
        card = decode_msgpack(other.export, Export)
        lies = [b"", b"junk", encode_msgpack({"format": "kvferry-transport/2"})]
        for change in ({"slots": 1 << 40}, {"stride_bytes": 1}, {"base": Address((1 << 64) - 4096)}):
            lies.append(changed(other, slots=msgspec.structs.replace(card.slots, **change)))  # type: ignore[arg-type]
        for lie in lies:
            with pytest.raises(DocumentError):
                open_peer("auto", lie)
        with pytest.raises(TransportUnavailable, match="loopback"):
            open_peer("tcp", changed(other, tcp=TcpCard("192.0.2.1", 80)))
    with pytest.raises(DocumentError, match="must be one of"):
        open_transport("carrier pigeon", Staging(1, 4096))
    with pytest.raises(TransportUnavailable, match="address of one machine"):
        open_transport("tcp", Staging(1, 4096), host="0.0.0.0")


def test_shm_gives_the_slot_itself() -> None:
    with target("shm", 0xFFFF81AB54E01000) as other:
        peer = open_peer("shm", other.export)
        places = []

        def fill(out: Bytes) -> None:
            out[:] = 7
            places.append(out)

        peer.write(other.addresses[1].plus(8), GRANT, 100, fill, 5.0)
        (place,) = places
        expected = np.full(SLOTS * SLOT_BYTES, 0xEE, np.uint8)
        expected[SLOT_BYTES + 8 : SLOT_BYTES + 108] = 7
        assert other.do("read") == expected.tobytes()
        peer.close()
        place[:] = 8  # a view outlives the connection: the memory is never taken away under its user
        with pytest.raises(TransportError, match="closed"):
            put(peer, other.addresses[1], GRANT, pattern(8), 5.0)


def test_tcp_checks_grants_before_it_writes() -> None:
    with target("tcp") as other:
        before = other.do("read")

        def refused(slot: int, nbytes: int, reason: str) -> None:
            with pytest.raises(TransportError, match=reason):
                put(open_peer("tcp", other.export), other.addresses[slot], GRANT, pattern(nbytes), 5.0)

        refused(0, 64, "unknown or revoked grant")
        other.do("grant", GRANT, 1, 100)
        refused(0, 64, "outside the grant of 100 bytes in slot 1")
        refused(1, 101, "outside the grant of 100 bytes in slot 1")
        other.do("revoke", GRANT)
        refused(1, 64, "unknown or revoked grant")
        assert other.do("read") == before


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (-1, 8),
        (SLOT_BYTES - 4, 8),
        (0, SLOT_BYTES + 1),
        (0, (1 << 64) - 1),
        (-0xFFFF81AB54E01000, 8),
        (8, (1 << 64) - 8),
    ],
)
def test_tcp_checks_the_range_itself(offset: int, nbytes: int) -> None:
    with target("tcp", 0xFFFF81AB54E01000) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        before = other.do("read")
        connection = greeted(other)
        connection.sendall(frame(WRITE, GRANT, other.addresses[0].value + offset, nbytes) + b"x" * 64)
        assert b"in no slot" in connection.recv(4096)
        assert other.do("read") == before
        connection.close()


def frame(kind: int, grant: bytes, address: int, nbytes: int) -> bytes:
    return HEADER.pack(FRAME_MAGIC, VERSION, kind, len(grant), address, nbytes, grant)


def connected(other: Target) -> socket.socket:
    card = decode_msgpack(other.export, Export).tcp
    assert card is not None
    return socket.create_connection((card.host, card.port), timeout=5)


def greeted(other: Target) -> socket.socket:
    connection = connected(other)
    connection.sendall(frame(HELLO, decode_msgpack(other.export, Export).key, 0, 0))
    assert connection.recv(REPLY.size)[4] == 1
    return connection


def test_tcp_nothing_lands_after_a_revoke_has_returned() -> None:
    with target("tcp") as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        connection = greeted(other)
        connection.sendall(frame(WRITE, GRANT, other.addresses[0].value, 4096) + b"a" * 100)
        deadline = time.monotonic() + 5
        while other.do("read")[:100] != b"a" * 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        other.do("revoke", GRANT)
        connection.settimeout(5)
        try:  # it may break already here
            connection.sendall(b"b" * 3996)
            assert connection.recv(100) == b""
        except ConnectionError:
            pass
        assert other.do("read")[:101] == b"a" * 100 + b"\xee"
        connection.close()


JUNK = [
    b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64,
    b"\xff" * 64,
    FRAME_MAGIC + b"\xff" * 60,
    b"K",
    frame(WRITE, GRANT, 0, 0),
]


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("polite", [True, False])
def test_f65_junk_ends_its_own_connection_only(junk: bytes, polite: bool) -> None:
    with target("tcp") as other:
        peer = open_peer("tcp", other.export)
        before = other.do("read")
        connection = greeted(other) if polite else connected(other)
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        while True:  # it answers or not, and closes
            try:
                if not connection.recv(4096):
                    break
            except ConnectionResetError:
                break
        connection.close()
        assert other.do("read") == before
        other.do("grant", GRANT, 0, SLOT_BYTES)
        put(peer, other.addresses[0], GRANT, pattern(64), 5.0)
        assert other.do("read")[:64] == pattern(64).tobytes()


def test_tcp_write_has_a_deadline_while_the_target_is_stopped() -> None:
    with target("tcp") as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        peer = open_peer("tcp", other.export)
        pid = other.process.pid
        assert pid is not None
        pause(pid)
        try:
            started = time.monotonic()
            with pytest.raises(TransportError, match=r"not done within 0\.3 s"):
                put(peer, other.addresses[0], GRANT, pattern(SLOT_BYTES), 0.3)
            assert time.monotonic() - started < 3
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(TransportError):
            put(peer, other.addresses[0], GRANT, pattern(64), 5.0)  # the stream's place is lost
        other.do("revoke", GRANT)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_waiting_uses_no_cpu(name: str) -> None:
    """Under 3 % of a core on either side, connected and with nothing to do."""
    with target(name) as other:
        open_peer(name, other.export)
        ours, theirs = time.process_time(), other.do("cpu")
        time.sleep(2)
        assert other.do("cpu") - theirs < 0.06
        assert time.process_time() - ours < 0.06


@pytest.mark.parametrize("name", TRANSPORTS)
def test_two_endpoints_of_one_process_reach_each_other(name: str) -> None:
    staging = Staging(1, 5000)
    transport = open_transport(name, staging)
    transport.grant(GRANT, 0, 5000)
    peer = open_peer(name, transport.export())
    put(peer, staging.address(0), GRANT, pattern(5000), 5.0)
    assert staging.view(0).tobytes() == pattern(5000).tobytes()
    peer.close()
    transport.close()
    staging.close()


def test_staging_gives_its_memory_back() -> None:
    def mapped() -> int:
        with open("/proc/self/maps", encoding="ascii") as maps:
            return sum("kvferry-staging" in line for line in maps)

    before = mapped(), len(os.listdir("/proc/self/fd"))
    staging = Staging(2, 100)
    view = staging.view(1)
    assert mapped() > before[0]
    with pytest.raises(OSError):
        os.ftruncate(staging.fd, 0)  # sealed: no peer can shrink it
    staging.close()
    view[:] = 1  # alive while it is used
    with pytest.raises(TransportError, match="closed"):
        staging.view(0)
    del view
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before


def test_process_vm_moves_more_runs_than_one_call_takes() -> None:
    count = 2 * IOVECS + 5
    source = pattern(count * 8)
    goal = np.zeros(count * 8, np.uint8)
    lengths = np.random.default_rng(3).integers(0, 9, count).astype(np.uint64)
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(8)
    from_, to = Address(source.ctypes.data), Address(goal.ctypes.data)
    move_runs(
        "process_vm_writev", os.getpid(), Addresses([from_]).plus(offsets), Addresses([to]).plus(offsets), lengths
    )
    for i, length in enumerate(lengths.tolist()):
        expected = source[8 * i : 8 * i + length].tobytes() + bytes(8 - length)
        assert goal[8 * i : 8 * i + 8].tobytes() == expected


def test_process_vm_after_a_partial_count_says_what_is_wrong() -> None:
    """Two pages of which the second can't be read: the call moves what it can, the next one fails."""
    mapping = mmap.mmap(-1, 8192)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address + 4096), 4096, 0) == 0
    source = pattern(8192)
    with pytest.raises(TransportError, match="an address is not mapped there"):
        move_runs(
            "process_vm_writev",
            os.getpid(),
            Addresses([Address(source.ctypes.data)]),
            Addresses([Address(address)]),
            np.array([8192], np.uint64),
        )
    assert bytes(mapping[:4096]) == source[:4096].tobytes()
    assert libc.mprotect(ctypes.c_void_p(address + 4096), 4096, 3) == 0
