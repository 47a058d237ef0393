"""The clock of deadlines and leases: monotonic, and running on while the machine is suspended, where there is one."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def now_s() -> float:
    """Seconds since some moment of this machine's past. Two machines' clocks have nothing to do with each other."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
