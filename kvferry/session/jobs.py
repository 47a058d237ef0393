"""What takes time: planning, gathering and writing, scattering, digesting. Each on threads of its own, each answered by
an event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Union

from kvferry.errors import KVFerryError
from kvferry.layout.document import Instance, Worker
from kvferry.plan.dense import dense_copies
from kvferry.session.events import (
    CancelWrites,
    Event,
    Prepare,
    PrepareFailed,
    Scatter,
    Scattered,
    ScatterFailed,
    Verified,
    Verify,
    VerifyFailed,
    Write,
)
from kvferry.session.messages import Peer
from kvferry.session.prepare import Preparer, owned_digests
from kvferry.session.shell import LOG, JobThreads
from kvferry.session.writing import Gathers, Writer
from kvferry.transport.base import Memory, Transport
from kvferry.transport.staging import Staging

Job = Union[Prepare, Write, CancelWrites, Scatter, Verify]


class Jobs:
    """`instance` describes `worker` only, whose pages are in `memory`. `post` takes the events.

    One thread plans, one scatters and digests, and each peer that is written to has a writer, so that a slow one delays
    nobody. `do` and the `forget…` methods are called from one thread.
    """

    def __init__(
        self,
        instance: Instance,
        worker: Worker,
        memory: Memory,
        transport: Transport,
        staging: Staging,
        preparer: Preparer,
        gathers: Gathers,
        post: Callable[[Event], None],
    ) -> None:
        self._instance, self._worker, self._memory = instance, worker, memory
        self._transport, self._staging, self._preparer = transport, staging, preparer
        self._gathers, self._post = gathers, post
        self._planner, self._lander = JobThreads("planner"), JobThreads("lander")
        self._writers: dict[Peer, Writer] = {}
        self._cancelled: dict[str, threading.Event] = {}

    def do(self, job: Job) -> None:
        if isinstance(job, Prepare):
            self._planner.put(lambda: self._prepare(job))
        elif isinstance(job, Scatter):
            self._lander.put(lambda: self._scatter(job))
        elif isinstance(job, Verify):
            self._lander.put(lambda: self._verify(job))
        elif isinstance(job, Write):
            self._write(job)
        else:
            self._cancelled.setdefault(job.transfer, threading.Event()).set()

    def links(self) -> dict[str, str]:
        """By peer that we have written to: which transport moves the bytes, and why that one."""
        links = [(peer, writer.link) for peer, writer in list(self._writers.items())]
        return {str(peer): f"{link.name}: {link.reason}" for peer, link in links if link is not None}

    def forget_transfer(self, transfer: str) -> None:
        self._cancelled.pop(transfer, None)

    def forget_peer(self, peer: Peer) -> None:
        writer = self._writers.pop(peer, None)
        if writer is not None:
            writer.close(0.0)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued; False if something of it takes longer, and it goes on then."""
        threads = (self._planner, self._lander)
        for one in threads:
            one.end()
        ended = [one.join(timeout_s) for one in threads]
        ended += [writer.close(timeout_s) for writer in self._writers.values()]
        return all(ended)

    def _write(self, job: Write) -> None:
        cancelled = self._cancelled.setdefault(job.transfer, threading.Event())
        if job.peer not in self._writers:
            parts = (self._transport, self._instance, self._worker, self._memory, self._gathers, self._answer)
            self._writers[job.peer] = Writer(job.peer, *parts)
        self._writers[job.peer].put(job, cancelled)

    # on other threads

    def _prepare(self, job: Prepare) -> None:
        self._answer(lambda: self._preparer.prepare(job), lambda error: PrepareFailed(job.transfer, error))

    def _scatter(self, job: Scatter) -> None:
        def scatter() -> Event:
            group = self._instance.group(job.chunk.box.group)
            copies = dense_copies(self._worker, group, job.chunk, job.tables)
            self._memory.scatter(copies, self._staging.view(job.slot)[: job.nbytes])
            return Scattered(job.transfer, job.peer, job.piece, len(copies.lengths))

        self._answer(scatter, lambda error: ScatterFailed(job.transfer, job.peer, job.piece, error))

    def _verify(self, job: Verify) -> None:
        def verify() -> Event:
            gather = self._memory.gather
            found = owned_digests(job, self._instance, self._worker, gather, self._staging.slot_bytes)
            return Verified(job.transfer, found)

        self._answer(verify, lambda error: VerifyFailed(job.transfer, error))

    def _answer(self, work: Callable[[], Event], failed: Callable[[KVFerryError], Event]) -> None:
        """Every job is answered, whatever happens in it: a slot waits for the answer."""
        try:
            event = work()
        except KVFerryError as error:
            event = failed(error)
        except Exception as error:
            LOG.exception("%s: unexpected error", self._instance.instance)
            event = failed(KVFerryError(f"{type(error).__name__}: {error}"))
        self._post(event)
