"""Threads of an endpoint, without any decision: job queues, registry errands."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from kvferry.errors import RegistryError
from kvferry.session.clock import now_s
from kvferry.session.events import Found, NotFound
from kvferry.session.meeting import Meeting
from kvferry.session.registry import Entry

LOG = logging.getLogger("kvferry.session")
LOOKUP_S = 0.05
LOOKUP_MAX_S = 0.25
"""A registry that doesn't know an instance yet is asked again after this time, at first sooner."""


class Bell:
    """Wakes the thread that polls `descriptor`, from any other."""

    def __init__(self) -> None:
        self.descriptor, self._rope = os.pipe()
        self._lock = threading.Lock()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._rope, False)

    def ring(self) -> None:
        with self._lock:
            if self._rope < 0:
                return  # closed: nobody listens, and the number may be somebody else's descriptor by now
            try:
                os.write(self._rope, b"\0")
            except BlockingIOError:
                pass  # the pipe is full of wake-ups already

    def still(self) -> None:
        os.read(self.descriptor, 65536)

    def close(self) -> None:
        with self._lock:
            os.close(self._rope)
            self._rope = -1
        os.close(self.descriptor)


class JobThreads:
    """Take jobs in order. A job that raises is logged; its thread goes on."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """The threads end when everything queued is done."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for them; False if that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                LOG.exception("a job failed without an answer")


class Rendezvous:
    """Keeps our entry alive in our registry and asks registries about instances until they are ready.

    Each registry is asked by a thread of its own, which ends when nothing is left to ask: one that doesn't answer
    delays nobody else.
    """

    def __init__(self, registry: Meeting, entry: Entry, ttl_s: float, post: Callable[[Found | NotFound], None]) -> None:
        self._registry, self._entry, self._ttl_s, self._post = registry, entry, ttl_s, post
        self._wanted: dict[str, dict[str, float]] = {}  # by registry URL, "" for ours: until when, by instance
        self._wake = threading.Condition()
        self.problem = ""  # why we are not registered
        self._closed = self._changed = False
        self._thread = threading.Thread(target=self._renew, name="kvferry-rendezvous", daemon=True)
        self._thread.start()

    def lookup(self, instance: str, until_s: float, registry: str = "") -> None:
        with self._wake:
            asked = registry in self._wanted
            names = self._wanted.setdefault(registry, {})
            names[instance] = max(until_s, names.get(instance, 0.0))
            self._wake.notify_all()
        if not asked:
            threading.Thread(target=self._ask_all, args=(registry,), name="kvferry-lookup", daemon=True).start()

    def announce(self, entry: Entry) -> None:
        """This is our entry from now on."""
        with self._wake:
            self._entry, self._changed = entry, True
            self._wake.notify_all()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()
        try:
            self._registry.delete(self._entry)
        except RegistryError as error:
            LOG.info("could not sign off: %s", error)

    def _renew(self) -> None:
        while not self._closed:
            try:
                self._registry.put(self._entry, self._ttl_s)
                self.problem = ""
                wait_s = self._ttl_s / 3
            except RegistryError as error:
                if str(error) != self.problem:  # said once, not twice a second
                    LOG.warning("not registered: %s", error)
                self.problem = str(error)
                wait_s = min(0.5, self._ttl_s / 3)
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._changed, wait_s)
                self._changed = False

    def _ask_all(self, url: str) -> None:
        registry = self._registry.at(url) if url else self._registry
        pause_s = LOOKUP_S
        while True:
            with self._wake:
                names = dict(self._wanted[url])
                if self._closed or not names:
                    del self._wanted[url]
                    return
            for name, until_s in names.items():
                self._ask(registry, url, name, until_s)
            with self._wake:
                if not self._closed and self._wanted[url].keys() <= names.keys():
                    self._wake.wait(pause_s)
            pause_s = min(1.2 * pause_s, LOOKUP_MAX_S)

    def _ask(self, registry: Meeting, url: str, name: str, until_s: float) -> None:
        try:
            view = registry.instance(name)
            problem = view.missing
        except (RegistryError, ValueError) as error:  # ValueError: a name that UTF-8 can't carry
            problem = str(error)
        if problem:
            self._post(NotFound(name, problem, url))
        with self._wake:
            wanted = self._wanted[url]
            # a lookup that came while we were asking gets an answer of its own
            if wanted.get(name, 0.0) <= until_s and (not problem or until_s <= now_s()):
                wanted.pop(name, None)
        if not problem:
            self._post(Found(name, view.workers, url))
