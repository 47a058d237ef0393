"""The other process of the transport tests: owns landing slots and does what the test says over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.layout.address import Address
from kvferry.transport.base import open_transport
from kvferry.transport.staging import Staging

SLOTS = 3
SLOT_BYTES = 8192


def serve(pipe: Connection, name: str, base: int | None) -> None:
    staging = Staging(SLOTS, SLOT_BYTES, None if base is None else Address(base))
    for slot in range(SLOTS):
        staging.view(slot)[:] = 0xEE  # guard: whatever isn't written must stay
    transport = open_transport(name, staging)
    pipe.send((transport.export(), [staging.address(slot).value for slot in range(SLOTS)]))
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            break
        if command == "grant":
            transport.grant(*arguments)
        elif command == "revoke":
            transport.revoke(*arguments)
        elif command == "close":
            transport.close()
            staging.close()
        if command == "read":
            pipe.send(b"".join(staging.view(slot).tobytes() for slot in range(SLOTS)))
        elif command == "cpu":
            pipe.send(time.process_time())
        else:
            pipe.send(len(os.listdir("/proc/self/fd")))


class Target:
    def __init__(self, name: str, base: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, base), daemon=True)
        self.process.start()
        theirs.close()
        self.export, addresses = self._answer()
        self.addresses = [Address(value) for value in addresses]

    def _answer(self) -> Any:
        assert self._pipe.poll(30), "the target process doesn't answer"
        return self._pipe.recv()

    def do(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._answer()

    def stop(self) -> None:
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def pause(pid: int) -> None:
    """Stop the process, and wait until each of its threads stands still: the signal alone only asks for it."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not all(_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.005)


def _stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # the thread has ended
        return True


@contextmanager
def target(name: str, base: int | None = None) -> Iterator[Target]:
    one = Target(name, base)
    try:
        yield one
    finally:
        one.stop()
