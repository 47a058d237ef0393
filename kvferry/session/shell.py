"""Threads and system calls of an endpoint, without any decision: job queues, registry errands, witnessed deaths."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from kvferry.errors import RegistryError
from kvferry.session.events import Found, NotFound
from kvferry.session.messages import Process
from kvferry.session.registry import Entry, Registry
from kvferry.transport.process import start_ticks

LOG = logging.getLogger("kvferry.session")
LOOKUP_S = 0.05


class JobThread:
    """Runs jobs in order. A job that raises is logged; the thread goes on."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued; False if that takes longer."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                LOG.exception("a job failed without an answer")


class Rendezvous:
    """Keeps our entry alive in the registry and asks it about instances until they are ready."""

    def __init__(
        self, registry: Registry, entry: Entry, ttl_s: float, post: Callable[[Found | NotFound], None]
    ) -> None:
        self._registry, self._entry, self._ttl_s, self._post = registry, entry, ttl_s, post
        self._wanted: dict[str, float] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._renew_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-rendezvous", daemon=True)
        self._thread.start()

    def lookup(self, instance: str, until_s: float) -> None:
        with self._wake:
            self._wanted[instance] = max(until_s, self._wanted.get(instance, 0.0))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        try:
            self._registry.delete(self._entry)
        except RegistryError as error:
            LOG.info("could not sign off: %s", error)

    def _run(self) -> None:
        while True:
            self._renew()
            with self._wake:
                names = list(self._wanted.items())
            for name, until_s in names:
                self._ask(name, until_s)
            with self._wake:
                if self._closed:
                    return
                if not set(self._wanted) - {name for name, _ in names}:
                    wait_s = self._renew_s - time.monotonic()
                    self._wake.wait(max(0.0, min(wait_s, LOOKUP_S) if self._wanted else wait_s))

    def _renew(self) -> None:
        now = time.monotonic()
        if now < self._renew_s:
            return
        try:
            self._registry.put(self._entry, self._ttl_s)
            self._renew_s = now + self._ttl_s / 3
        except RegistryError as error:
            LOG.warning("not registered: %s", error)
            self._renew_s = now + min(0.5, self._ttl_s / 3)

    def _ask(self, name: str, until_s: float) -> None:
        try:
            view = self._registry.instance(name)
            problem = view.missing
        except (RegistryError, ValueError) as error:  # ValueError: a name that UTF-8 can't carry
            problem = str(error)
        if problem:
            self._post(NotFound(name, problem))
        with self._wake:
            # a lookup that came while we were asking gets an answer of its own
            if self._wanted.get(name, 0.0) <= until_s and (not problem or until_s <= time.monotonic()):
                self._wanted.pop(name, None)
        if not problem:
            self._post(Found(name, view.workers))


def this_process() -> Process | None:
    """None where deaths can't be witnessed."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return Process(os.getpid(), start_ticks(os.getpid()), os.readlink("/proc/self/ns/pid"))
    except (OSError, ValueError):
        return None


def open_death_watch(process: Process) -> int | None:
    """A descriptor that is readable once the process has ended; None where that can't be known (other namespace)."""
    ours = this_process()
    if ours is None or ours.namespace != process.namespace:
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    try:
        # opened first, compared then: a reused pid can't slip in between
        if start_ticks(process.pid) == process.start:
            return descriptor
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    return None
