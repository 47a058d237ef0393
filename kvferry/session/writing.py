"""Writing to one peer: the link, and two threads, so that one piece is gathered while another is on the wire."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry.errors import KVFerryError, PlanError, TransportError
from kvferry.layout.document import Instance, Worker
from kvferry.plan.dense import DenseCopies, dense_copies
from kvferry.plan.digest import layer_digests
from kvferry.session.events import Write, WriteFailed, Written
from kvferry.session.messages import Digest, Peer
from kvferry.session.shell import LOG, JobThreads
from kvferry.transport.base import Fill, LinkClosed, Memory, Transport
from kvferry.transport.base import Peer as Link
from kvferry.transport.copies import Bytes
from kvferry.transport.runs import cut_to_each_other, decode_runs, one_run

Answer = Callable[[Callable[[], Written], Callable[[KVFerryError], WriteFailed]], None]
"""Runs the first; what it raises goes through the second. What comes out is posted to the control thread."""
Gathers = Callable[[str, int, int], bool]
"""(way, runs, bytes) → whether to gather them into one write rather than post each run as it lies."""
THREADS = 2
GATHERING = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))
"""Pieces that are bound and gathered at once in this process, for all peers: more would only wait for each other, and
for the copies of the transport."""


class Writer:
    """Gathers pieces from the pages of `worker` and writes them to one peer; connects when the first one comes."""

    def __init__(
        self,
        peer: Peer,
        transport: Transport,
        instance: Instance,
        worker: Worker,
        memory: Memory,
        gathers: Gathers,
        answer: Answer,
    ) -> None:
        self._peer, self._transport, self._gathers, self._answer = peer, transport, gathers, answer
        self._instance, self._worker, self._memory = instance, worker, memory
        self._changing = threading.Lock()
        self.link: Link | None = None
        self._closed = False
        self._used: list[Link] = []  # once for each write that is under way
        self._threads = JobThreads(f"writer-{peer.rank}", THREADS)

    def put(self, job: Write, cancelled: threading.Event) -> None:
        """`cancelled`: set when the transfer has ended; a write that has not begun then must not begin."""
        self._threads.put(lambda: self._answer(partial(self._write, job, cancelled), partial(self._failed, job)))

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued, then hang up; False if that takes longer, and it goes on then."""
        self._threads.end()
        ended = self._threads.join(timeout_s)
        with self._changing:
            self._closed = True
            links, self.link = [link for link in (self.link, *self._used) if link is not None], None
        for link in links:
            link.close()
        return ended

    def _write(self, job: Write, cancelled: threading.Event) -> Written:
        if cancelled.is_set():
            raise TransportError("the transfer ended before this write began")
        for fence in job.fences:
            fence()
        with GATHERING:
            copies = dense_copies(self._worker, self._instance.group(job.chunk.box.group), job.chunk, job.tables)
        if copies.total_bytes != job.nbytes:
            raise PlanError(f"piece {job.piece} has {copies.total_bytes} bytes here, {job.nbytes} were granted")
        digests: tuple[int, ...] = ()

        def gather(out: Bytes) -> None:
            nonlocal digests
            with GATHERING:
                self._memory.gather(copies, out)
            if job.digest is not None:
                digests = self._digests(job, out, job.digest)

        try:
            name, count, gathered = self._try(job, copies, gather)
        except LinkClosed:  # by a write of another transfer, which must not fail this one too
            name, count, gathered = self._try(job, copies, gather)
        return Written(job.transfer, job.peer, job.piece, count, digests, name, gathered)

    def _try(self, job: Write, copies: DenseCopies, gather: Fill) -> tuple[str, int, bool]:
        link = self._take(job.export)
        try:
            return link.name, *self._send(link, job, copies, gather)
        except TransportError:
            self._forget(link)
            raise
        finally:
            self._give_back(link)

    def _digests(self, job: Write, data: Bytes, digest: Digest) -> tuple[int, ...]:
        group = self._instance.group(job.chunk.box.group)
        found = layer_digests(group, job.chunk, data, digest.key, digest.whole[group.name])
        return tuple(found[layer] for layer in job.chunk.box.layers)

    def _send(self, link: Link, job: Write, copies: DenseCopies, gather: Fill) -> tuple[int, bool]:
        """Into the peer's pages where it gave their runs; else into its slot, gathered or as it lies. How many runs,
        and whether they were gathered.
        """
        if job.runs:
            target = decode_runs(job.runs, job.nbytes)
        elif link.moves and self._memory.spans and not self._gathers(link.name, len(copies.lengths), job.nbytes):
            target = one_run(link.slot_at(job.address, job.nbytes), job.nbytes)
        else:
            link.write(job.address, job.grant, job.nbytes, gather, job.timeout_s)
            return len(copies.lengths), True
        if job.digest is not None:
            gather(np.empty(job.nbytes, np.uint8))
        runs = cut_to_each_other(self._memory.runs(copies), target)
        link.move(*runs, job.timeout_s)
        return len(runs[-1]), False

    def _failed(self, job: Write, error: KVFerryError) -> WriteFailed:
        return WriteFailed(job.transfer, job.peer, job.piece, error)

    def _take(self, export: bytes) -> Link:
        with self._changing:
            if self._closed:
                raise TransportError(f"the line to {self._peer} is closed")
            if self.link is None:
                self.link = self._transport.connect(export)
                LOG.info("writes to %s by %s (%s)", self._peer, self.link.name, self.link.reason)
            self._used.append(self.link)
            return self.link

    def _forget(self, link: Link) -> None:
        """The next write connects again."""
        with self._changing:
            if self.link is link:
                self.link = None

    def _give_back(self, link: Link) -> None:
        """A forgotten link is closed by the last write that used it: what is under way there is not its fault."""
        with self._changing:
            self._used.remove(link)
            unused = link is not self.link and link not in self._used
        if unused:
            link.close()
