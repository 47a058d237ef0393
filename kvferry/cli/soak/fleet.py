"""The processes of a soak: ranks of instances, and a registry. Any of them may be stopped or dead at any moment, so
nothing here waits for an answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.cli.crew import Member
from kvferry.cli.soak.pool import Shape
from kvferry.cli.soak.worker import Ended, Look, Worker
from kvferry.session.keys import make_keys, read_keys
from kvferry.session.registry import RegistryServer

TURN_S = 0.01
"""How often a worker is asked what has ended."""


class Registry:
    """The registry's process, in the process. `keys`: the folder of its keys, if it has any."""

    def open(self, port: int, keys: Path | None) -> int:
        self._server = RegistryServer(port=port, keys=read_keys(keys) if keys else None)
        return int(self._server.url.rpartition(":")[2])


@dataclass(frozen=True)
class Numbers:
    """What a process uses, as the kernel says."""

    descriptors: int
    threads: int
    memory_bytes: int


def numbers(pid: int) -> Numbers:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    threads, descriptors = (len(os.listdir(process / name)) for name in ("task", "fd"))
    return Numbers(descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE"))


class Seat:
    """A place for a process, which is started, stopped, continued, killed and started again."""

    def __init__(self, name: str, make: Callable[[], object], opening: tuple[object, ...]) -> None:
        self.name, self._make, self._opening = name, make, opening
        self.state: Literal["starting", "open", "stopped", "dead"] = "dead"
        self._member: Member | None = None
        self._asked: str = ""
        self._before: Literal["starting", "open"] = "open"
        self.starts = 0

    @property
    def pid(self) -> int:
        assert self._member is not None
        return self._member.pid

    @property
    def living(self) -> bool:
        return self.state != "dead"

    def start(self) -> None:
        self._member = Member(self.name, self._make)
        self.starts += 1
        self.state = "starting"
        self._ask("open", *self._opening)

    def stop(self) -> None:
        """SIGSTOP. The kernel stops it very soon, not at once."""
        self._before = "starting" if self.state == "starting" else "open"
        self.state = "stopped"
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.state = self._before

    def kill(self) -> None:
        assert self._member is not None
        self._member.kill()
        self.state, self._asked = "dead", ""

    def numbers(self) -> Numbers:
        return numbers(self.pid)

    def _ask(self, command: str, *arguments: object) -> None:
        assert self._member is not None
        self._asked = command
        self._member.begin(command, *arguments)

    def _answer(self) -> object:
        """What came back to what was asked last, None where it has not come. WorkerFailed where it has failed."""
        if not self._asked or self._member is None or not self._member.answers:
            return None
        answer = self._member.answer()
        if self._asked == "open":
            self._opened(answer)
        self._asked = ""
        return answer

    def _opened(self, answer: object) -> None:
        if self.state == "starting":
            self.state = "open"
        self._before = "open"


class WorkerSeat(Seat):
    """One rank of an instance."""

    def __init__(self, instance: str, rank: int, make: Callable[[], Worker], opening: tuple[object, ...]) -> None:
        super().__init__(f"{instance}/{rank}", make, opening)
        self.instance, self.rank = instance, rank
        self._commands: list[tuple[str, object]] = []
        self._turn_s = 0.0
        self.looks: list[Look] = []

    def say(self, command: str, what: object) -> None:
        """Done as soon as it can: when it is open, and not stopped."""
        self._commands.append((command, what))

    def look(self) -> None:
        """`looks` gets what it holds."""
        self._commands.append(("look", None))

    def kill(self) -> None:
        super().kill()
        self._commands.clear()

    def pump(self) -> list[Ended]:
        """Ask and hear; never waits. WorkerFailed where the process has failed or is gone."""
        answer = self._answer()
        if isinstance(answer, Look):
            self.looks.append(answer)
        if self.state == "open" and not self._asked and (self._commands or self._turn_s <= time.monotonic()):
            self._turn_s = time.monotonic() + TURN_S
            if self._commands and self._commands[0][0] == "look":
                del self._commands[0]
                self._ask("look")
            else:
                until = next((i for i, c in enumerate(self._commands) if c[0] == "look"), len(self._commands))
                now, self._commands = self._commands[:until], self._commands[until:]
                self._ask("turn", now)
        return answer if isinstance(answer, list) else []


class RegistrySeat(Seat):
    """Started again it has the same port, and knows nobody."""

    NAME = "registry"

    def __init__(self, keys: Path | None) -> None:
        super().__init__(self.NAME, Registry, (0, keys))
        self.start()
        assert self._member is not None
        self.port = int(self._member.answer())
        self._asked, self.state, self._opening = "", "open", (self.port, keys)

    def pump(self) -> None:
        self._answer()


def make_deployment(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """A folder of keys for each of these, which know each other, by name."""
    first, *others = found = {name: folder / name.replace("/", "-") for name in names}
    make_keys(found[first], found[first].name)
    for name in others:
        make_keys(found[name], found[name].name, join=found[first])
    for name in others:
        shutil.copytree(found[first] / "allowed", found[name] / "allowed", dirs_exist_ok=True)
    return found


class Fleet:
    """`shapes`: by instance; `keys`: an empty folder for the keys of all, None where they have none. Use as a context
    manager.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], transport: str, make: Callable[[], Worker], keys: Path | None = None
    ) -> None:
        places = [(name, shape, rank) for name, shape in shapes.items() for rank in range(shape.tp)]
        names = [RegistrySeat.NAME, *(f"{name}/{rank}" for name, _, rank in places)]
        folders = make_deployment(keys, names) if keys else {}
        self.registry = RegistrySeat(folders.get(RegistrySeat.NAME))
        url = f"http://127.0.0.1:{self.registry.port}"
        self.workers = [
            WorkerSeat(name, rank, make, (name, shape, rank, url, transport, folders.get(f"{name}/{rank}")))
            for name, shape, rank in places
        ]
        for seat in self.workers:
            seat.start()

    @property
    def seats(self) -> list[Seat]:
        return [*self.workers, self.registry]

    def of(self, instance: str) -> list[WorkerSeat]:
        return [seat for seat in self.workers if seat.instance == instance]

    def pump(self) -> list[tuple[WorkerSeat, Ended]]:
        """What has ended, and where."""
        self.registry.pump()
        return [(seat, ended) for seat in self.workers if seat.living for ended in seat.pump()]

    def heal(self) -> None:
        """Whoever is stopped goes on, whoever is dead starts again."""
        for seat in self.seats:
            if seat.state == "stopped":
                seat.go_on()
            elif not seat.living:
                seat.start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for seat in self.seats:
            if seat.living:
                seat.kill()
