"""A prefill and a decode endpoint in this process, for tests that look inside."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any

from kvferry.observe.records import Log, decode_log
from kvferry.session.endpoint import Endpoint
from kvferry.session.events import Report
from tests.session.crew import Worker
from tests.session.pools import Shape, page_list

SHAPE = Shape(pages=60)
_numbers = itertools.count()


class Duo:
    """`prefill` and `decode` are instances of one worker each."""

    def __init__(self, registry: str, **options: Any) -> None:
        options = {"slots": 4, "slot_bytes": 256, **options}
        number = next(_numbers)
        self.prefill_name, self.decode_name = f"p{number}", f"d{number}"
        self.prefill, self.decode = Worker(), Worker()
        self.prefill.open(self.prefill_name, SHAPE, 0, registry, **options)
        self.decode.open(self.decode_name, SHAPE, 0, registry, **options)

    @property
    def ends(self) -> tuple[Endpoint, Endpoint]:
        assert self.prefill.endpoint and self.decode.endpoint
        return self.prefill.endpoint, self.decode.endpoint

    def begin(self, transfer: str, tokens: int = 20, timeout_s: float = 20.0) -> None:
        pages = page_list(SHAPE, (0, tokens), 0, seed=1)
        self.prefill.send(transfer, pages, 0, (0, tokens), timeout_s)
        self.decode.receive(transfer, self.prefill_name, pages, 0, (0, tokens), timeout_s)

    def move(self, transfer: str, tokens: int = 20) -> Report:
        """One transfer, to its end on both sides."""
        self.begin(transfer, tokens)
        report: Report = self.decode.wait(transfer)
        self.prefill.wait(transfer)
        return report

    def logs(self) -> tuple[Log, Log]:
        sending, receiving = self.ends
        return decode_log(sending.trace(), "prefill"), decode_log(receiving.trace(), "decode")

    def around(self, worker: Worker, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        """From now on these are called around `name` of the worker's memory."""
        honest = getattr(worker.memory, name)

        def call(*args: Any) -> Any:
            before()
            try:
                return honest(*args)
            finally:
                after()

        setattr(worker.memory, name, call)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def samples(log: Log, name: str) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in log.samples if sample.name == name}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
