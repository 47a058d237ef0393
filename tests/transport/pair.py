"""A target and a source in processes of their own, and an observer, the test, that sees the landing slot all the time.

The source writes OLD into the only slot. The observer can stop either process in the middle of that, and reuses the
slot by filling it with REUSED. Whatever is OLD afterwards was written after the reuse.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import TransportError
from kvferry.layout.address import Address
from kvferry.transport.base import open_transport
from kvferry.transport.copies import Bytes
from kvferry.transport.staging import HEADER_BYTES, Staging, map_file
from tests.transport.target import pause

OLD, REUSED, UNTOUCHED = 0xA5, 0x5B, 0xEE
GRANT = bytes(range(16))
ANSWER_S = 60
SETTLE_S = 0.3
"""How long bytes that are under way are waited for, after the write has ended: a progress round takes 20 ms."""
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "process_vm": ("process_vm", {}),
    "tcp": ("tcp", {}),
    "nixl-sm": ("nixl", {"UCX_TLS": "tcp,sm,self"}),
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp,self"}),
}
"""What the tables call a way: the transport, and the environment of both processes."""


def serve_target(pipe: Connection, way: str, slot_bytes: int) -> None:
    name, environment = WAYS[way]
    os.environ.update(environment)
    staging = Staging(1, slot_bytes)
    staging.view(0)[:] = UNTOUCHED
    transport = open_transport(name, staging)
    transport.grant(GRANT, 0, slot_bytes)
    pipe.send((transport.export(), staging.address(0).value, staging.fd, staging.file_bytes))
    while True:
        (command,) = pipe.recv()
        if command == "revoke":
            transport.revoke(GRANT)
        elif command == "close":
            transport.close()
        pipe.send(command)


def serve_source(pipe: Connection, events: Connection, way: str, export: bytes, address: int, nbytes: int) -> None:
    name, environment = WAYS[way]
    os.environ.update(environment)
    transport = open_transport(name, Staging(1, 4096))
    peer = transport.connect(export)
    go = threading.Event()

    def fill(out: Bytes) -> None:
        half = out.nbytes // 2
        out[:half] = OLD
        events.send("half")
        go.wait()
        out[half:] = OLD

    def write(timeout_s: float) -> None:
        try:
            peer.write(Address(address), GRANT, nbytes, fill, timeout_s)
        except TransportError as error:
            events.send(f"raised: {error}")
        else:
            events.send("returned")

    pipe.send(peer.name)
    while True:
        command, *arguments = pipe.recv()
        if command == "write":
            held, timeout_s = arguments
            go.clear() if held else go.set()
            threading.Thread(target=write, args=(timeout_s,), daemon=True).start()
        elif command == "go":
            go.set()
        elif command == "close peer":
            peer.close()
        elif command == "close transport":
            transport.close()
        pipe.send(command)


class Child:
    """A process that does what it is told; `stop` and `go_on` as SIGSTOP and SIGCONT do it."""

    def __init__(self, main: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.hello = self.answer()

    def do(self, *command: Any) -> None:
        self.tell(*command)
        self.answer()

    def tell(self, *command: Any) -> None:
        """As `do`, without waiting for it; `answer` must follow."""
        self._pipe.send(command)

    def stop(self) -> None:
        pause(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel says through a pidfd that no thread of it is left."""
        watch = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        assert poll.poll(ANSWER_S * 1000), f"process {self.pid} does not end"
        os.close(watch)
        self._process.join()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), f"process {self.pid} doesn't answer"
        return self._pipe.recv()


class Pair:
    """Both processes and the slot as the observer sees it, through a mapping of its own."""

    def __init__(self, way: str, slot_bytes: int) -> None:
        self.target = Child(serve_target, way, slot_bytes)
        export, address, fd, file_bytes = self.target.hello
        mapped = os.open(f"/proc/{self.target.pid}/fd/{fd}", os.O_RDWR)
        try:
            self.slot: Bytes = map_file(mapped, file_bytes)[HEADER_BYTES : HEADER_BYTES + slot_bytes]
        finally:
            os.close(mapped)
        self.events, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
        try:
            self.source = Child(serve_source, theirs, way, export, address, slot_bytes)
        except BaseException:
            self.target.kill()
            raise
        theirs.close()

    def write(self, *, held: bool = False, timeout_s: float = 20.0) -> None:
        """The source starts to write; `held`: and waits in the middle of its gather for `release`."""
        self.source.do("write", held, timeout_s)
        assert self.events.poll(ANSWER_S), "the write doesn't begin"
        assert self.events.recv() == "half"

    def release(self) -> None:
        self.source.do("go")

    def outcome(self, timeout_s: float = ANSWER_S) -> str:
        """'returned', 'raised: why', or '' where the write has not ended by then."""
        return str(self.events.recv()) if self.events.poll(timeout_s) else ""

    def unfinished(self) -> bool:
        return bool(self.slot[-1] != OLD)

    def clear(self) -> None:
        self.slot[:] = UNTOUCHED

    def reuse(self) -> None:
        """Somebody else's bytes, from the back, since writers come from the front."""
        for chunk in reversed(np.array_split(self.slot, 64)):
            chunk[:] = REUSED

    def landed(self) -> int:
        """Bytes of the old write. After `reuse`: those that came later."""
        return int(np.count_nonzero(self.slot == OLD))

    def any_landed(self) -> bool:
        """A quick look: one byte of each page."""
        return bool((self.slot[::4096] == OLD).any())

    def end(self) -> None:
        for child in (self.source, self.target):
            if child.alive:
                child.kill()
        self.events.close()


@contextmanager
def pair(way: str, slot_bytes: int) -> Iterator[Pair]:
    one = Pair(way, slot_bytes)
    try:
        yield one
    finally:
        one.end()


def unread_bytes(pid: int) -> int:
    """What waits in the sockets of a process, in the kernel, for it to read."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        name = os.readlink(fd)
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[9] in inodes and row[3] != "0A")
