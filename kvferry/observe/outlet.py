"""How an endpoint tells: a Unix socket for whoever asks, a file after a failure, and metrics where that is wished."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import DocumentError
from kvferry.observe import files, prometheus, runtime
from kvferry.observe.files import Files
from kvferry.observe.observer import Observer
from kvferry.observe.prometheus import Address
from kvferry.observe.records import encode_log
from kvferry.observe.snapshot import LIVE, Snapshots
from kvferry.session.messages import Peer
from kvferry.session.shell import JobThreads

LOG = logging.getLogger("kvferry.observe")
ANSWER_S = 5.0
"""How long whoever asks may take to say what, and to read the answer."""
PENDING = 16
"""Failures whose file has not been written yet; more at once are skipped and counted."""
NUMBERS = b"numbers"
TRACE = b"trace"


@dataclass(frozen=True)
class Tells:
    """`run`: the folder of sockets; `files`: where logs of failures go, `metrics`: where they are served, if at all."""

    run: Path
    files: Path | None = None
    metrics: Address | None = None


def tells(trace: Path | str | None, metrics: str | None, rank: int, keys: bool) -> Tells:
    """What isn't given comes from KVFERRY_RUN, KVFERRY_TRACE and KVFERRY_METRICS; rank r is served at its port + r.

    DocumentError, KeysError and MissingExtra for a place of metrics that can't be used.
    """
    folder = trace or os.environ.get(files.VARIABLE)
    place = metrics or os.environ.get(prometheus.VARIABLE)
    address = None
    if place:
        prometheus.need()
        first = prometheus.parse_address(place, prometheus.VARIABLE, keys)
        address = Address(first.host, first.port + rank if first.port else 0)
    return Tells(runtime.run_folder(), Path(folder) if folder else None, address)


class Outlet:
    """Opened and closed with its endpoint, whose lock is `lock`. Where the socket can't be made there is none."""

    def __init__(
        self, me: Peer, observer: Observer, snapshots: Snapshots, lock: AbstractContextManager[object], to: Tells
    ) -> None:
        self._me, self._numbers, self._snapshots, self._lock = me, observer.numbers, snapshots, lock
        self._files = Files(to.files, me.instance, me.rank) if to.files else None
        self._writer = JobThreads("trace") if self._files else None
        self._pending = threading.Semaphore(PENDING)
        if self._files:
            observer.failed = self._failed
        LIVE.add(snapshots)
        self._metrics = to.metrics if to.metrics and prometheus.SHARED.open(to.metrics, snapshots) else None
        self._socket: socket.socket | None = None
        self._path: Path | None = None
        try:
            self._socket, self._path = runtime.listen(to.run, me.instance, me.rank, me.generation)
        except (OSError, DocumentError) as error:
            LOG.warning("%s: `kvferry trace` can't ask this worker: %s", me, error)
            return
        self._thread = threading.Thread(target=self._serve, args=(self._socket,), name="kvferry-observe", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Files of what has failed are still written, as far as that takes no longer."""
        LIVE.discard(self._snapshots)
        if self._metrics is not None:
            prometheus.SHARED.close(self._metrics, self._snapshots)
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join(timeout_s)
            self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._writer is not None:
            self._writer.end()
            self._writer.join(timeout_s)

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.settimeout(ANSWER_S)
                    if runtime.may_ask(connection):
                        asked = connection.recv(16)
                        connection.sendall(encode_log(self._snapshots.take(records=asked.startswith(TRACE))))
                except OSError as error:
                    LOG.info("%s: whoever asked has gone: %s", self._me, error)
                except Exception:
                    LOG.exception("%s: could not tell what happened", self._me)

    def _failed(self, transfer: str) -> None:
        """On the endpoint's control thread, under its lock."""
        assert self._writer is not None
        if self._pending.acquire(blocking=False):
            self._writer.put(lambda: self._write(transfer))
        else:
            self._numbers.count("kvferry_trace_files_total", "skipped")

    def _write(self, transfer: str) -> None:
        assert self._files is not None
        outcome = "written"
        try:
            path = self._files.write(self._snapshots.take(file=f"transfer {transfer} failed", transfer=transfer))
            LOG.info("%s: what happened to transfer %s is in %s", self._me, transfer, path)
        except OSError as error:
            outcome = "failed"
            LOG.warning("%s: the log of a failed transfer can't be written: %s", self._me, error)
        finally:
            self._pending.release()
        with self._lock:
            self._numbers.count("kvferry_trace_files_total", outcome)
