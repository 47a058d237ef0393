"""One side of one transfer, as its caller sees it."""

from __future__ import annotations

import threading
from typing import Literal

from kvferry.errors import TransferError
from kvferry.session.clock import now_s
from kvferry.session.events import Report
from kvferry.session.messages import Role


class Transfer:
    """Made by `Endpoint.send` and `Endpoint.receive`, ended by the endpoint."""

    def __init__(self, role: Role, transfer: str, timeout_s: float, peer: str = "") -> None:
        """`peer`: the other instance, where the call names one."""
        self.id = transfer
        self.peer = peer
        self.role = role
        self.hidden = False
        self.state: Literal["running", "done", "failed"] = "running"
        self.error: TransferError | None = None
        self.report: Report | None = None
        self.started_s = now_s()
        self.deadline_s = self.started_s + timeout_s
        self._ended = threading.Event()
        self._pages_free = threading.Event()

    @property
    def pages_free(self) -> bool:
        """Whether its pages may be used for something else. With landing="pages" a failed transfer may hold them longer
        than it runs, until it is certain that no peer writes there; otherwise they are free when it has ended.
        """
        return self._pages_free.is_set()

    def __repr__(self) -> str:
        return f"<Transfer {self.id!r} {self.role} {self.state}>"

    def _end(self, report: Report | None, error: TransferError | None, pages_held: bool = False) -> None:
        self.report, self.error = report, error
        self.state = "failed" if error else "done"
        if not pages_held:
            self._pages_free.set()
        self._ended.set()
