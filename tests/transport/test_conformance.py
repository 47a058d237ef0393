"""What every transport promises, between two real processes."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest

from kvferry.errors import TransportError, TransportUnavailable
from kvferry.layout.address import Address
from kvferry.layout.document import decode_msgpack, encode_msgpack
from kvferry.transport.auto import Exports
from kvferry.transport.base import Peer, open_transport
from kvferry.transport.process_vm import ProcessVm, VmExport
from kvferry.transport.shm import SharedMemory, ShmExport
from kvferry.transport.staging import Staging
from kvferry.transport.tcp import HEADER, Tcp, TcpExport
from tests.transport.target import SLOT_BYTES, SLOTS, Target, target

NAMES = ("shm", "process_vm", "tcp")
BASES = (None, 0xFFFF81AB54E01000, (1 << 63) - 4096, (1 << 64) - SLOTS * SLOT_BYTES, 4096)
GRANT = bytes(range(16))


def open_peer(name: str, export: bytes) -> Peer:
    return open_transport(name, Staging(1, 4096)).connect(export)


def pattern(nbytes: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_arrive_at_any_address_and_nothing_else_changes(name: str, base: int | None) -> None:
    """F1: emulated device addresses with bit 63 set, and regions that end exactly at 2**64."""
    with target(name, base) as other:
        peer = open_peer(name, other.export)
        expected = np.full(SLOTS * SLOT_BYTES, 0xEE, np.uint8)
        for slot, (start, nbytes) in enumerate([(0, SLOT_BYTES), (1, 1), (4093, 3001)]):
            other.do("grant", GRANT, slot, SLOT_BYTES)
            data = pattern(nbytes, slot)
            peer.write(other.addresses[slot].plus(start), GRANT, data, 5.0)
            expected[slot * SLOT_BYTES + start : slot * SLOT_BYTES + start + nbytes] = data
        peer.write(other.addresses[2], GRANT, pattern(0), 5.0)
        assert other.do("read") == expected.tobytes()
        peer.close()


@pytest.mark.parametrize("name", NAMES)
def test_writes_outside_the_landing_memory_are_refused(name: str) -> None:
    base = 0xFFFF81AB54E01000
    with target(name, base) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        before = other.do("read")
        peer = open_peer(name, other.export)
        last = other.addresses[0].plus(SLOTS * SLOT_BYTES - 8)
        for address in (last, Address(base - 8), Address(16), Address((1 << 64) - 8)):
            with pytest.raises(TransportError):
                peer.write(address, GRANT, pattern(16), 5.0)
        assert other.do("read") == before
        peer.write(other.addresses[0], GRANT, pattern(16), 5.0)  # a refusal doesn't spoil the way
        assert other.do("read")[:16] == pattern(16).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_peer_gives_an_error_soon_or_harmless_success(name: str) -> None:
    """Shared memory outlives its owner, so there a write succeeds and nobody reads it; the others notice."""
    with target(name) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        peer = open_peer(name, other.export)
        other.kill()
        started = time.monotonic()
        if name == "shm":
            peer.write(other.addresses[0], GRANT, pattern(16), 30.0)
        else:
            with pytest.raises(TransportError):
                peer.write(other.addresses[0], GRANT, pattern(16), 30.0)
        assert time.monotonic() - started < 10
        with pytest.raises(TransportUnavailable):
            open_peer(name, other.export)


@pytest.mark.parametrize("name", NAMES)
def test_threads_may_write_at_once(name: str) -> None:
    with target(name) as other:
        grants = [bytes([i]) * 16 for i in range(SLOTS)]
        for slot, grant in enumerate(grants):
            other.do("grant", grant, slot, SLOT_BYTES)
        peer = open_peer(name, other.export)

        def fill(slot: int) -> None:
            for start in range(0, SLOT_BYTES, 512):
                data = pattern(512, slot * 100 + start)
                peer.write(other.addresses[slot].plus(start), grants[slot], data, 10.0)

        threads = [threading.Thread(target=fill, args=(slot,)) for slot in range(SLOTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [pattern(512, s * 100 + start) for s in range(SLOTS) for start in range(0, SLOT_BYTES, 512)]
        assert other.do("read") == np.concatenate(expected).tobytes()


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", ["auto", "local", *NAMES])
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
        assert open_peer("auto", other.export).name == "shm"
        with pytest.raises(TransportError):
            open_peer("shm", b"junk")
        assert open_peer("tcp", other.export).name == "tcp"  # one side may insist on another way
    with target("tcp") as other:
        with pytest.raises(TransportUnavailable, match="shm: the peer doesn't offer it"):
            open_peer("shm", other.export)
        export = encode_msgpack({"by_name": {"tcp": only(other), "shm": shm_of_nobody()}})
        peer = open_peer("auto", export)
        assert peer.name == "tcp"
        assert "/proc/" in peer.reason
        assert "process_vm: the peer doesn't offer it" in peer.reason


def only(other: Target) -> bytes:
    """The one export in the bundle of a target that has one transport."""
    (export,) = decode_msgpack(other.export, Exports).by_name.values()
    return export


def bundle(name: str, card: object) -> bytes:
    return encode_msgpack(Exports({name: encode_msgpack(card)}))


def shm_of_nobody() -> bytes:
    return encode_msgpack(ShmExport(2**22 + 1, 0, 0, 1 << 20, bytes(16), Address(0)))


def test_a_process_id_that_was_used_again_is_noticed() -> None:
    with target("process_vm") as other, target("shm") as mapped:
        card = decode_msgpack(only(other), VmExport)
        for change in ({"start_ticks": card.start_ticks + 1}, {"nonce": bytes(16)}, {"header": Address(4096)}):
            with pytest.raises(TransportUnavailable):
                open_peer("process_vm", bundle("process_vm", replace(card, change)))
        shm = decode_msgpack(only(mapped), ShmExport)
        for change in ({"nonce": bytes(16)}, {"inode": 1}, {"file_bytes": shm.file_bytes + 4096}, {"fd": 0}):
            with pytest.raises(TransportUnavailable):
                open_peer("shm", bundle("shm", replace(shm, change)))


def replace(card: object, change: dict[str, object]) -> object:
    import msgspec

    return msgspec.structs.replace(card, **change)  # type: ignore[type-var]


def test_tcp_checks_grants_before_it_writes() -> None:
    with target("tcp") as other:
        peer = open_peer("tcp", other.export)
        before = other.do("read")
        with pytest.raises(TransportError, match="unknown or was revoked"):
            peer.write(other.addresses[0], GRANT, pattern(64), 5.0)
        other.do("grant", GRANT, 1, 100)
        with pytest.raises(TransportError, match="granted slot"):
            peer.write(other.addresses[0], GRANT, pattern(64), 5.0)  # another slot than the granted one
        with pytest.raises(TransportError, match="granted slot"):
            peer.write(other.addresses[1], GRANT, pattern(101), 5.0)
        other.do("revoke", GRANT)
        with pytest.raises(TransportError, match="revoked"):
            peer.write(other.addresses[1], GRANT, pattern(64), 5.0)
        assert other.do("read") == before


def test_tcp_nothing_lands_after_a_revoke_has_returned() -> None:
    with target("tcp") as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        connection = raw_connection(other)
        connection.sendall(HEADER.pack(b"KVFT", 1, other.addresses[0].value, 4096, GRANT) + b"a" * 100)
        deadline = time.monotonic() + 5
        while other.do("read")[:100] != b"a" * 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        other.do("revoke", GRANT)
        connection.sendall(b"b" * 3996)
        assert connection.recv(100)[4:6] == b"\0\1"
        assert other.do("read")[:101] == b"a" * 100 + b"\xee"


def raw_connection(other: Target) -> socket.socket:
    card = decode_msgpack(only(other), TcpExport)
    connection = socket.create_connection((card.host, card.port), timeout=5)
    return connection


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64, os.urandom(64), b"KVFT" + b"\xff" * 36, b"K"])
def test_f65_junk_ends_its_own_connection_only(junk: bytes) -> None:
    with target("tcp") as other:
        peer = open_peer("tcp", other.export)
        before = other.do("read")
        connection = raw_connection(other)
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        while True:  # it answers or not, and closes
            try:
                if not connection.recv(4096):
                    break
            except ConnectionResetError:
                break
        assert other.do("read") == before
        other.do("grant", GRANT, 0, SLOT_BYTES)
        peer.write(other.addresses[0], GRANT, pattern(64), 5.0)
        assert other.do("read")[:64] == pattern(64).tobytes()


def test_tcp_write_has_a_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, never answers
    card = TcpExport("127.0.0.1", listener.getsockname()[1], Address(0), 1 << 20)
    peer = open_peer("tcp", bundle("tcp", card))
    started = time.monotonic()
    with pytest.raises(TransportError, match="timed out"):
        peer.write(Address(0), GRANT, pattern(1 << 20), 0.3)
    assert time.monotonic() - started < 3
    listener.close()


def test_exports_of_one_process_work_for_itself() -> None:
    staging = Staging(1, 4096)
    for kind in (SharedMemory, ProcessVm, Tcp):
        transport = kind(staging)
        transport.grant(GRANT, 0, 4096)
        transport.connect(transport.export()).write(staging.address(0), GRANT, pattern(4096), 5.0)
        assert staging.view(0).tobytes() == pattern(4096).tobytes()
        transport.close()
