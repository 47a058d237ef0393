"""What moving costs, per way: enough to choose between gathering runs into one write and posting each as it lies.

`DEFAULTS` were measured on a machine with 2 cores and no accelerator. `kvferry bench transfer --save-costs` measures
this one, once and for all.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvferry.cache import cache_folder
from kvferry.errors import DocumentError
from kvferry.layout.document import Struct, decode_json

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Cost(Struct, frozen=True):
    """Seconds per run or descriptor, and per byte."""

    run_s: Seconds
    byte_s: Seconds

    def seconds(self, runs: float, nbytes: float) -> float:
        return runs * self.run_s + nbytes * self.byte_s


class Costs(Struct, frozen=True):
    """`gather`: pages into a buffer by this processor (a scatter costs the same); `ways`: by name of the transport."""

    format: Literal["kvferry-costs/1"]
    gather: Cost
    ways: dict[str, Cost]

    def gathers(self, way: str, runs: int, nbytes: int) -> bool:
        """Whether to gather `runs` runs of `nbytes` bytes together into one write, rather than post each run."""
        wire = self.ways.get(way)
        if wire is None or way not in MOVES:
            return True
        gathered = self.gather.seconds(runs, nbytes) + wire.seconds(1, nbytes)
        return gathered < wire.seconds(runs, nbytes)


MOVES = {"process_vm", "nixl"}
"""Ways that can post runs as they lie, and land them in pages."""
DEFAULTS = Costs(
    "kvferry-costs/1",
    Cost(73e-9, 0.095e-9),
    {
        "shm": Cost(0.0, 0.12e-9),
        "process_vm": Cost(0.57e-6, 0.21e-9),
        "nixl": Cost(2.3e-6, 0.2e-9),
        "tcp": Cost(0.23e-6, 0.31e-9),
    },
)


def costs_file() -> Path:
    """$KVFERRY_COSTS, else `costs.json` in the cache folder."""
    named = os.environ.get("KVFERRY_COSTS")
    return Path(named) if named else cache_folder() / "costs.json"


@lru_cache(maxsize=1)
def known_costs() -> Costs:
    """Those measured on this machine, else the defaults. DocumentError for a file that is no costs document."""
    path = costs_file()
    try:
        return decode_json(path.read_bytes(), Costs)
    except FileNotFoundError:
        return DEFAULTS
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None
