"""Knowing a process on this host for certain: process ids are reused, a process file descriptor is not."""

from __future__ import annotations

import os
import select
import threading

from kvferry.errors import TransportError, TransportUnavailable


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; OSError where there is none."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


class ProcessWatch:
    """Holds on to one process, named by id and start. TransportUnavailable where it isn't there."""

    def __init__(self, pid: int, ticks: int) -> None:
        if not hasattr(os, "pidfd_open"):
            raise TransportUnavailable("this Python can't hold on to a process (os.pidfd_open is missing)")
        self.pid = pid
        self._lock = threading.Lock()
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid)
            # opened first, compared then: a reused id can't slip in between
            found = start_ticks(pid)
        except OSError as error:
            self.close()
            raise TransportUnavailable(f"process {pid} can't be seen from here: {error.strerror}") from None
        if found != ticks:
            self.close()
            raise TransportUnavailable(f"process {pid} is not the one that started at tick {ticks} but at {found}")

    def check(self) -> None:
        """TransportError once the process has ended."""
        with self._lock:
            if self._fd < 0:
                raise TransportError(f"the connection to process {self.pid} is closed")
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if poll.poll(0):
                raise TransportError(f"process {self.pid} has ended")

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
