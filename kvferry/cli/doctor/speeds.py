"""How fast each transport moves bytes between two processes of this machine, measured by two that are thrown away.

Nobody else's landing memory is written to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvferry.cli.crew import Crew
from kvferry.cli.doctor.finding import Finding
from kvferry.cli.doctor.packages import EXTRAS, installed
from kvferry.cli.doctor.units import size, speed
from kvferry.errors import EngineError
from kvferry.layout.address import Address
from kvferry.transport.base import Transport, open_transport
from kvferry.transport.staging import Staging

AREA = "speed"
WAYS = ("shm", "process_vm", "tcp", "nixl")
SLOT_BYTES = 64 << 20
"""Larger than the caches of most processors."""
WRITES = 4
LIMIT_S = 20.0
GRANT = bytes(16)
CURES = {
    "shm": "run the workers of one host as one user and in one process namespace (docker run --pid=host --ipc=host)",
    "process_vm": "nothing, where shm works; else allow ptrace between the workers (see ptrace scope)",
    "tcp": "look whether a firewall or a namespace forbids connections to 127.0.0.1",
    "nixl": "nothing, where shm and tcp will do; else see docs/transports/nixl.md and UCX_LOG_LEVEL=debug",
}


class Scratch:
    """One of the two processes: it has a slot, or writes into the other one's."""

    def __init__(self) -> None:
        self._staging: Staging | None = None
        self._transport: Transport | None = None

    def offer(self, way: str) -> tuple[bytes, Address]:
        """How to connect, and the slot to write to."""
        transport, staging = self._open(way)
        transport.grant(GRANT, 0, SLOT_BYTES)
        return transport.export(), staging.address(0)

    def write(self, way: str, export: bytes, slot: Address) -> float:
        """Bytes per second of the fastest of a few writes of a whole slot; the first ones pay for page faults."""
        peer = self._open(way)[0].connect(export)
        data = np.ones(SLOT_BYTES, np.uint8)
        took_s = []
        for _ in range(WRITES):
            started_s = time.perf_counter()
            peer.write(slot, GRANT, SLOT_BYTES, lambda out: np.copyto(out, data), LIMIT_S)
            took_s.append(time.perf_counter() - started_s)
        peer.close()
        return SLOT_BYTES / min(took_s)

    def landed(self) -> bool:
        assert self._staging is not None
        return bool((self._staging.view(0) == 1).all())

    def _open(self, way: str) -> tuple[Transport, Staging]:
        for opened in (self._transport, self._staging):
            if opened is not None:
                opened.close()
        self._staging = Staging(1, SLOT_BYTES)
        self._transport = open_transport(way, self._staging)
        return self._transport, self._staging


def measure(ways: Sequence[str] = WAYS) -> tuple[list[Finding], dict[str, float]]:
    """One line for each transport that is installed, and bytes per second of those that work."""
    found, speeds = [], {}
    with Crew("doctor's process", Scratch) as crew:
        for way in ways:
            if way == "nixl" and not installed(EXTRAS[0]):
                continue
            source, target = crew.take(2)
            try:
                bytes_per_s = source("write", way, *target("offer", way))
                if not target("landed"):
                    raise EngineError("the bytes did not arrive")
            except EngineError as error:
                level = "red" if way == "tcp" else "yellow" if way == "shm" else "green"
                text = f"can't be used between two processes here: {error}"
                found.append(Finding(level, AREA, way, text, CURES[way]))  # type: ignore[arg-type]  # a level
                continue
            speeds[way] = bytes_per_s
            text = f"{speed(bytes_per_s)}, {size(SLOT_BYTES)} at once between two processes here"
            found.append(Finding("green", AREA, way, text))
    return found, speeds
