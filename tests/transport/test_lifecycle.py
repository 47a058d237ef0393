"""Registrations, restarts and processes: what stays true when either side begins again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.layout.address import Address
from kvferry.transport.base import open_transport
from kvferry.transport.copies import Bytes
from kvferry.transport.nixl import Agent
from kvferry.transport.staging import Staging
from tests.transport.installed import NIXL_PROBLEM, TRANSPORTS
from tests.transport.target import SLOT_BYTES, Target, target

BASE = 0xFFFF81AB54E01000
GRANT = bytes(range(16))
NEEDS_NIXL = pytest.mark.skipif(bool(NIXL_PROBLEM), reason=NIXL_PROBLEM)


def seven(out: Bytes) -> None:
    out[:] = 7


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_target_that_begins_again_at_the_same_addresses_is_another_one(name: str) -> None:
    """An old connection writes nothing into the new process; the new export works."""
    staging = Staging(1, 4096)
    transport = open_transport(name, staging)
    with target(name, BASE) as old:
        old.do("grant", GRANT, 0, SLOT_BYTES)
        peer = transport.connect(old.export)
        peer.write(old.addresses[0], GRANT, 64, seven, 5.0)
        old.kill()
    with target(name, BASE) as new:
        assert new.addresses == old.addresses
        new.do("grant", GRANT, 0, SLOT_BYTES)
        before = new.do("read")
        with pytest.raises(TransportError):
            peer.write(new.addresses[0], GRANT, 64, seven, 5.0)
        assert new.do("read") == before
        with pytest.raises(TransportError):
            transport.connect(old.export)
        again = transport.connect(new.export)
        again.write(new.addresses[0], GRANT, 64, seven, 5.0)
        assert new.do("read")[:64] == b"\x07" * 64
        again.close()
    peer.close()
    transport.close()
    staging.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_landing_memory_that_grows_at_the_same_address(name: str) -> None:
    """Closed and made again, larger, under the same addresses, in one process."""
    ours = Staging(1, 4096)
    source = open_transport(name, ours)
    small = Staging(1, 4096, Address(BASE))
    first = open_transport(name, small)
    first.grant(GRANT, 0, 4096)
    old_export = first.export()
    source.connect(old_export).close()
    first.close()
    small.close()

    large = Staging(1, 8192, Address(BASE))
    second = open_transport(name, large)
    second.grant(GRANT, 0, 8192)
    with pytest.raises(TransportError):
        source.connect(old_export).write(Address(BASE), GRANT, 4096, seven, 5.0)
    assert not large.view(0).any()
    peer = source.connect(second.export())
    peer.write(Address(BASE).plus(4096), GRANT, 4096, seven, 5.0)
    assert not large.view(0)[:4096].any() and (large.view(0)[4096:] == 7).all()
    peer.close()
    for transport, staging in ((second, large), (source, ours)):
        transport.close()
        staging.close()


@NEEDS_NIXL
def test_nixl_takes_the_same_pointer_again_with_a_larger_size() -> None:
    """Both registrations live; the metadata of the second one reaches all of it."""
    memory = np.zeros(8192, np.uint8)
    owner, other = Agent(), Agent()
    owner.register(memory[:4096])
    owner.register(memory)
    name = other.call("add", lambda a: a.add_remote_agent(owner.export([memory])))
    source = np.full(4096, 7, np.uint8)
    other.register(source)
    here = np.array([[source.ctypes.data, 4096, 0]], np.uint64)
    there = np.array([[memory.ctypes.data + 4096, 4096, 0]], np.uint64)

    def post(agent: object) -> tuple[object, str]:
        lists = [agent.get_xfer_descs(rows, "DRAM") for rows in (here, there)]  # type: ignore[attr-defined]
        handle = agent.initialize_xfer("WRITE", *lists, name)  # type: ignore[attr-defined]
        return handle, agent.transfer(handle)  # type: ignore[attr-defined]

    handle, state = other.call("write", post)
    deadline_s = time.monotonic() + 30
    while state == "PROC" and time.monotonic() < deadline_s:
        owner.call("progress", lambda a: a.get_new_notifs())
        state = other.call("check", lambda a: a.check_xfer_state(handle))
    assert state == "DONE"
    assert not memory[:4096].any() and (memory[4096:] == 7).all()
    for agent in (other, owner):
        agent.close()


@pytest.mark.parametrize("name", ["shm", "process_vm", "tcp"])
def test_a_forked_process_may_write(name: str) -> None:
    """It opens its own transport. UCX doesn't survive a fork, so NIXL needs a process that was spawned or executed."""
    with target(name) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        child = os.fork()
        if not child:
            status = 1
            try:
                peer = open_transport(name, Staging(1, 4096)).connect(other.export)
                peer.write(other.addresses[0], GRANT, 64, seven, 5.0)
                status = 0
            finally:
                os._exit(status)
        assert ended(child) == 0
        assert other.do("read")[:64] == b"\x07" * 64


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_fork_leaves_the_parent_s_connections_as_they_are(name: str) -> None:
    """Spawned processes are what every other test here uses; this is a fork that has nothing to do with us."""
    staging = Staging(1, 4096)
    transport = open_transport(name, staging)
    with target(name) as other:
        other.do("grant", GRANT, 0, SLOT_BYTES)
        peer = transport.connect(other.export)
        child = os.fork()
        if not child:
            os._exit(0)
        assert ended(child) == 0
        peer.write(other.addresses[0], GRANT, 64, seven, 5.0)
        assert other.do("read")[:64] == b"\x07" * 64
        peer.close()
    transport.close()
    staging.close()


def ended(child: int) -> int:
    """The exit code of our fork, which gets 30 s."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


@NEEDS_NIXL
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_500_nixl_connects_leave_no_descriptor() -> None:
    """Each time with an agent of its own, as 500 processes would have it."""
    with target("nixl") as other:
        connect_and_close(other)
        ours, theirs = descriptors(), other.do("count")
        for _ in range(500):
            connect_and_close(other)
        deadline_s = time.monotonic() + 30
        while other.do("count") > theirs and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert (descriptors(), other.do("count")) == (ours, theirs)


def connect_and_close(other: Target) -> None:
    staging = Staging(1, 4096)
    transport = open_transport("nixl", staging)
    transport.connect(other.export).close()
    transport.close()
    staging.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
