"""The process of one synthetic worker: it registers, waits for a driver, and does what that asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvferry.cli.verify.control import (
    Answer,
    Describe,
    Described,
    Done,
    Ended,
    Expect,
    Fill,
    Listener,
    Question,
    Send,
)
from kvferry.cli.verify.memory import SparseMemory
from kvferry.cli.verify.names import control_name, endpoint_name
from kvferry.cli.verify.synthetic import Synthetic
from kvferry.layout.document import Instance
from kvferry.session.choices import own_registry
from kvferry.session.endpoint import Endpoint
from kvferry.session.keys import access
from kvferry.session.messages import Peer
from kvferry.session.registry import Entry
from kvferry.session.shell import Rendezvous

TTL_S = 10.0
POLL_S = 0.2


class Node:
    """Lives in a process of its own, see `kvferry.cli.crew`."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._at_end: tuple[Callable[[], object], ...] = ()

    def start(
        self, document: Instance, rank: int, world: int, name: str, registry: str, options: dict[str, Any]
    ) -> None:
        """Register, and answer from now on. `document` holds this rank at least; `options` are the endpoint's."""
        synthetic = self.make(document, rank, world, endpoint_name(name), registry, options)
        at = access()
        me = Peer(control_name(name), time.time_ns(), rank)
        listener = Listener(me, at)
        entry = Entry(me.instance, me.generation, rank, world, listener.address, listener.key)
        rendezvous = Rendezvous(own_registry(registry, at), entry, TTL_S, lambda _: None)
        thread = threading.Thread(target=self._serve, args=(synthetic, listener, world), daemon=True)
        self._threads.append(thread)
        self._at_end = (rendezvous.close, listener.close, synthetic.close)
        thread.start()

    def make(
        self, document: Instance, rank: int, world: int, name: str, registry: str, options: dict[str, Any]
    ) -> Synthetic:
        worker = document.worker(rank)
        own = Instance(document.format, name, document.model, document.groups, (worker,))
        memory = SparseMemory(worker)
        endpoint = Endpoint(own, rank, memory.host, world=world, registry=registry, **options)
        return Synthetic(own, rank, memory, endpoint, worker)

    def stop(self) -> None:
        """Sign off and give everything back."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for close in self._at_end:
            close()

    def _serve(self, synthetic: Synthetic, listener: Listener, world: int) -> None:
        while not self._closing.is_set():
            listener.serve(lambda question: act(synthetic, world, question), POLL_S)


def act(worker: Synthetic, world: int, question: Question) -> Answer:
    if isinstance(question, Describe):
        return Described(worker.instance, world)
    if isinstance(question, Expect):
        worker.shares = question.shares
        worker.memory.clear()
        return Done()
    if isinstance(question, Fill):
        worker.fill(question.case)
        return Done()
    if isinstance(question, Send):
        return Ended(worker.send(question.case, question.transfer, question.timeout_s))
    return Ended(worker.receive(question.case, question.transfer, question.source, question.timeout_s))
