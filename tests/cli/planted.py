"""Workers with a fault of their own, for the soak to find."""

from __future__ import annotations

from typing import Any

from kvferry.cli.soak.worker import Request, Worker

EVERY = 5
"""Which requests are hit: not all, as a fault in the field would not hit all."""


def hit(request: str) -> bool:
    return int(request.rpartition("-")[2]) % EVERY == 0


class FlipsAByte(Worker):
    """After a request of a target has been committed, one byte of it changes: what a late writer would do."""

    def _ended(self, role: Any, name: str) -> Any:
        request = self._running[role, name][1]
        if role == "target" and hit(name):
            cells = self.pool._cells(self.pool._file)
            cells[0, 0, request.target_pages[0], 0, 0, 0] ^= 1
        return super()._ended(role, name)


class ScribblesLater(Worker):
    """Writes into pages that it has given back: nobody receives what is there, only a look at all memory can tell."""

    def _ended(self, role: Any, name: str) -> Any:
        ended = super()._ended(role, name)
        if role == "source" and hit(name):
            self.pool._file[-1] ^= 1  # the guard after its memory
        return ended


class LeaksASlot(Worker):
    """A slot is taken for nobody and never given back."""

    def receive(self, request: Request) -> None:
        super().receive(request)
        if hit(request.id):
            machine = self.endpoint._machine
            machine.core.ledger._free.pop()
            machine.core.ledger._doubt.setdefault(("nobody", machine.core.me), []).append(0)


class FailsWithoutReason(Worker):
    """Requests of one instance are aborted though nobody has asked for it."""

    def send(self, request: Request) -> None:
        super().send(request)
        if request.source == "prefill-b":
            self.abort(request.id)


class Complains(Worker):
    """A job raises what no job may raise, and everything goes on."""

    def receive(self, request: Request) -> None:
        super().receive(request)
        if hit(request.id):
            self.endpoint._jobs._lander.put(_raise)


def _raise() -> None:
    raise ZeroDivisionError("planted")
