"""Deaths of peers' processes, witnessed by the kernel: never guessed from silence. For one thread's use."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

import zmq

from kvferry.session.messages import Peer, Process
from kvferry.transport.process import start_ticks

GRACE_S = 0.25
"""What a peer said, and wrote over UCX, just before its end is read before its end is acted on."""


class Deaths:
    """`poller` wakes its thread when one of the watched processes has ended."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._watches: dict[int, Peer] = {}
        self._dying: dict[Peer, float] = {}

    def watch(self, peer: Peer, process: Process) -> None:
        """Where that can't be, only messages and deadlines tell."""
        descriptor = open_death_watch(process)
        if descriptor is not None:
            self._watches[descriptor] = peer
            self._poller.register(descriptor, zmq.POLLIN)

    def forget(self, peer: Peer) -> None:
        for descriptor in [fd for fd, watched in self._watches.items() if watched == peer]:
            self._unwatch(descriptor)

    def witness(self, ready: Collection[object], now: float) -> None:
        for descriptor in [fd for fd in ready if isinstance(fd, int) and fd in self._watches]:
            self._dying[self._unwatch(descriptor)] = now + GRACE_S

    def due(self, now: float) -> list[Peer]:
        """Who has died, each told once."""
        dead = [peer for peer, due_s in self._dying.items() if due_s <= now]
        for peer in dead:
            del self._dying[peer]
        return dead

    def next_s(self) -> float:
        return min(self._dying.values(), default=math.inf)

    def close(self) -> None:
        for descriptor in list(self._watches):
            os.close(descriptor)
        self._watches.clear()

    def _unwatch(self, descriptor: int) -> Peer:
        self._poller.unregister(descriptor)
        os.close(descriptor)
        return self._watches.pop(descriptor)


def this_process() -> Process | None:
    """None where deaths can't be witnessed."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        # the same number names the first namespace of every host
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return Process(os.getpid(), start_ticks(os.getpid()), namespace)
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
