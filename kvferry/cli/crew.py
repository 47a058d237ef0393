"""Worker processes of a command: each holds one object and obeys (method, arguments) through a pipe; gone with it."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from kvferry.errors import EngineError, KVFerryError, WorkerFailed

ANSWER_S = 180.0


class Member:
    """One process. `make`, a function or class that can be pickled, is called there and gives the object."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make), name=self.name, daemon=True)
        # an interrupt is for the process that was asked to stop; it ends the others, which inherit the mask
        resource_tracker.ensure_running()  # before: starting it lifts the mask
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()

    def begin(self, command: str, *arguments: object) -> None:
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise WorkerFailed(self.name, f"{command}: the process has ended ({error})") from None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def answers(self) -> bool:
        """Whether `answer` would return, or raise, at once."""
        try:
            return self._pipe.poll()
        except OSError:  # it has ended
            return True

    def answer(self) -> Any:
        """What the command returned. WorkerFailed with its reason."""
        try:
            if not self._pipe.poll(ANSWER_S):
                raise WorkerFailed(self.name, f"no answer within {ANSWER_S:g} s")
            good, value = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerFailed(self.name, f"the process has ended, exit code {self._process.exitcode}") from None
        if not good:
            raise WorkerFailed(self.name, value)
        return value

    def __call__(self, command: str, *arguments: object) -> Any:
        self.begin(command, *arguments)
        return self.answer()

    @property
    def processor_s(self) -> float:
        """Processor time of the process and all its threads so far, without asking it: it may be at work."""
        pid = self._process.pid
        assert pid is not None  # started
        return time.clock_gettime(~pid << 3 | 2)  # Linux: the clock of another process, see clock_getcpuclockid(3)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Crew:
    """As many processes as the largest case so far has needed."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        self._name, self._make = name, make
        self._members: list[Member] = []

    def take(self, count: int) -> list[Member]:
        while len(self._members) < count:
            self._members.append(Member(f"{self._name} {len(self._members)}", self._make))
        return self._members[:count]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()


def every(members: Sequence[Member], command: str, *arguments: object) -> list[Any]:
    """The same command to all, which work side by side; their answers in order."""
    for member in members:
        member.begin(command, *arguments)
    return answers(members)


def answers(members: Sequence[Member]) -> list[Any]:
    """One answer of each; the first error is raised when all have answered, so that no answer is left over."""
    found: list[Any] = []
    failed: EngineError | None = None
    for member in members:
        try:
            found.append(member.answer())
        except EngineError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return found


def serve(pipe: Connection, make: Callable[[], object]) -> None:
    """Obey (name, arguments) until the pipe is closed; answer (True, value) or (False, what went wrong)."""
    worker = make()
    with suppress(EOFError, OSError):
        while True:
            name, arguments = pipe.recv()
            command: Callable[..., object] = getattr(worker, name)
            try:
                pipe.send((True, command(*arguments)))
            except KVFerryError as error:
                pipe.send((False, str(error)))
            except Exception as error:
                pipe.send((False, f"{type(error).__name__}: {error}"))
