"""The processes that the cells of one transport are played on: a prefill worker, two decode workers, a registry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.cells import TRANSPORTS
from tests.faults.proxy import Loop, Proxy
from tests.faults.worker import FaultWorker
from tests.session.crew import Member
from tests.session.pools import Shape
from tests.transport.target import pause

SLOTS, SLOT_BYTES = 4, 256
TTL_S = 2.0
QUIET_S = 20.0
SHAPES = {"prefill": Shape(pages=32), "decode": Shape(tp=2, page_tokens=6, order="hnd", pages=32)}
TOKENS = 40
"""Of one transfer: 30 pieces for each decode worker, many more than it has slots."""


def until(condition: Callable[[], bool], what: str, timeout_s: float = QUIET_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


class Seat:
    """One rank of an instance; processes come and go on it."""

    def __init__(self, stage: Stage, instance: str, rank: int) -> None:
        self._stage = stage
        self.instance, self.rank, self.shape = instance, rank, SHAPES[instance]
        self.proxy = Proxy(stage.loop)
        self.alive = False

    def start(self) -> None:
        """A new process sits down; returns when the registry knows it."""
        self.member = self._stage.spares.pop()
        self._stage.spares.append(Member(FaultWorker))
        where = (self.instance, self.shape, self.rank, self._stage.registry_url)
        options = {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "digest": True, "ttl_s": TTL_S}
        self.proxy.to = self.member(
            "open_behind", self.proxy.port, *where, **options, **TRANSPORTS[self._stage.transport]
        )
        self.alive = True
        self.stopped = False
        until(lambda: self("registered"), f"{self} is registered")

    def __call__(self, name: str, *args: Any, **options: Any) -> Any:
        return self.member(name, *args, **options)

    def kill(self) -> None:
        self.member.kill()
        self.alive = False

    def stop(self) -> None:
        assert self.member.process.pid is not None
        pause(self.member.process.pid)
        self.stopped = True

    def go_on(self) -> None:
        self.member.signal(signal.SIGCONT)
        self.stopped = False

    def close(self) -> None:
        if self.alive:
            self.member.kill()
        self.proxy.close()

    def __str__(self) -> str:
        return f"{self.instance}/{self.rank}"


class RegistryProcess:
    """`kvferry registry` behind a proxy; started again it has the same port, and is empty."""

    def __init__(self, loop: Loop) -> None:
        self.proxy = Proxy(loop)
        self.alive = False
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvferry.cli.main", "registry", "--port", str(self.proxy.to)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.proxy.to = int(self._process.stdout.readline().rpartition(":")[2])
        self.alive = True

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
        self.alive = False

    def stop(self) -> None:
        pause(self._process.pid)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.alive:
            self.kill()
        self.proxy.close()


class Stage:
    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.loop = Loop()
        self.spares = [Member(FaultWorker) for _ in range(2)]
        self.registry = RegistryProcess(self.loop)
        self.registry_url = f"http://127.0.0.1:{self.registry.proxy.port}"
        self.prefill = Seat(self, "prefill", 0)
        self.decode = [Seat(self, "decode", rank) for rank in range(2)]
        self._used = 0
        for seat in self.seats:
            seat.start()
        Play(self).cross()

    @property
    def seats(self) -> list[Seat]:
        return [self.prefill, *self.decode]

    def number(self) -> int:
        self._used += 1
        return self._used

    def held(self) -> tuple[int, int]:
        """Pages (counted as transfers that keep some) and slots that are held on all seats together."""
        return sum(seat("pages_held") for seat in self.seats), sum(seat("slots_held") for seat in self.seats)

    def wrong_bytes(self) -> int:
        return sum(seat("wrong_bytes") for seat in self.seats)

    def close(self) -> None:
        for seat in self.seats:
            seat.close()
        for member in self.spares:
            member.kill()
        self.registry.close()
        self.loop.close()


class Play:
    """One transfer on a stage. Its tokens and pages are others than those of the transfer before."""

    def __init__(self, stage: Stage, timeout_s: float = 20.0) -> None:
        number = stage.number()
        self.stage, self.timeout_s = stage, timeout_s
        self.transfer = f"transfer-{number}"
        first = 8 * (number % 20)
        self.start, self.tokens = first, (first, first + TOKENS)
        self._random = np.random.default_rng(number)
        self.pages = {name: self._draw_pages(shape) for name, shape in SHAPES.items()}

    def _draw_pages(self, shape: Shape) -> list[int]:
        return self._random.permutation(shape.pages)[: -(-TOKENS // shape.page_tokens)].tolist()

    def send(self) -> None:
        where = (self.pages["prefill"], self.start, self.tokens)
        self.stage.prefill("own", *where)
        self.stage.prefill("send", self.transfer, *where, self.timeout_s)

    def receive(self, seat: Seat) -> None:
        where = (self.pages["decode"], self.start, self.tokens)
        seat("receive", self.transfer, "prefill", *where, self.timeout_s)

    def ended(self, seat: Seat, end: str) -> None:
        """Its pages hold what was sent, or go to somebody else at once."""
        if seat.instance == "prefill":
            return
        if end == "done":
            seat("arrived", self.pages["decode"], self.start, self.tokens)
        else:
            seat("own", self.pages["decode"], 212, (212, 212 + TOKENS))

    def cross(self) -> None:
        """All of it, without a fault; the error of whoever fails."""
        for seat in self.stage.decode:
            self.receive(seat)
        self.send()
        ends = {seat: seat("end", self.transfer) for seat in self.stage.seats}
        for seat, (end, _, _) in ends.items():
            self.ended(seat, end)
        problems = [f"{seat}: {text}" for seat, (end, text, _) in ends.items() if end != "done"]
        wrong_bytes = self.stage.wrong_bytes()
        assert not problems and not wrong_bytes, f"{wrong_bytes} wrong bytes; {'; '.join(problems)}"
