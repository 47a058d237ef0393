"""The transports that can be tested here. One that can't be is skipped with the reason, never left out silently."""

from __future__ import annotations

import pytest

from kvferry.errors import MissingExtra
from kvferry.transport.nixl import need_nixl


def _nixl_problem() -> str:
    try:
        need_nixl()
    except MissingExtra as error:
        return str(error)
    return ""


NIXL_PROBLEM = _nixl_problem()
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(NIXL_PROBLEM), reason=NIXL_PROBLEM))
TRANSPORTS = ["shm", "process_vm", "tcp", NIXL]
