"""F63: connects and aborts leave descriptors, threads and memory where they were, with keys and without."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.errors import TransferError
from kvferry.session.keys import Keys
from kvferry.session.registry import RegistryServer
from tests.session.deployment import deployment, endpoint
from tests.session.sim import TABLES, TOKENS

CONNECTS, ABORTS = 500, 1_000
WARM = 100
"""What is allocated once, by ZeroMQ's and Python's pools too, is there after so many."""
MORE_BYTES = 12 << 20
"""What may be added then: the event log fills up to its bound, and ended transfers are remembered by name."""
ONE, TWO = deployment("one", "two")


@pytest.fixture(params=["without keys", "with keys"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Keys | None, Keys | None]]:
    keys = (ONE, TWO) if request.param == "with keys" else (None, None)
    with RegistryServer(keys=keys[0]) as server:
        yield server.url, *keys


def held() -> tuple[int, int, int]:
    """Descriptors, threads, bytes of memory."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident


def settled(expected: Callable[[], bool]) -> tuple[int, int, int]:
    end_s = time.monotonic() + 10
    while not expected() and time.monotonic() < end_s:
        time.sleep(0.02)
    time.sleep(0.5)
    return held()


def compare(before: tuple[int, int, int], expected: Callable[[], bool], capsys: pytest.CaptureFixture[str]) -> None:
    """What is there for a moment only, as a registration that is being renewed just then, is waited for."""
    after, end_s = settled(expected), time.monotonic() + 10
    while (after[0] > before[0] or after[1] > before[1]) and time.monotonic() < end_s:
        time.sleep(0.1)
        after = held()
    with capsys.disabled():
        print(f"\n  descriptors, threads, bytes: {before} → {after}")
    assert after[0] <= before[0], "descriptors"
    assert after[1] <= before[1], "threads"
    assert after[2] <= before[2] + MORE_BYTES, "memory"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_f63_500_connects(pair: tuple[str, Keys | None, Keys | None], capsys: pytest.CaptureFixture[str]) -> None:
    """Each by a new start of the other side, which is closed then."""
    url, one, two = pair
    with endpoint("stays", url, two) as stays:
        for number in range(WARM + CONNECTS):
            if number == WARM:
                before = settled(lambda: not stays.stats()["peers"])
            with endpoint("comes", url, one):
                stays.connect("comes", timeout_s=20)
        compare(before, lambda: not stays.stats()["peers"], capsys)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_f63_1000_aborts(pair: tuple[str, Keys | None, Keys | None], capsys: pytest.CaptureFixture[str]) -> None:
    """From either side, at any moment."""
    url, one, two = pair
    rng = random.Random(1)
    with endpoint("p", url, one) as source, endpoint("d", url, two) as target:

        def still() -> bool:
            stats = source.stats(), target.stats()
            return not any(s["transfers_receiving"] + s["transfers_sending"] + s["slots_quarantined"] for s in stats)

        failed = 0
        for number in range(WARM + ABORTS):
            if number == WARM:
                before = settled(still)
            both = [source.send(f"t{number}", TOKENS, TABLES, timeout_s=20)]
            both.append(target.receive(f"t{number}", "p", TOKENS, TABLES, timeout_s=20))
            time.sleep(rng.random() * 0.01)
            side = rng.randrange(2)
            (source, target)[side].abort(both[side])
            for end, transfer in zip((source, target), both):
                try:
                    end.wait(transfer)
                except TransferError:
                    failed += 1
            source.poll(), target.poll()
        compare(before, still, capsys)
        assert failed > ABORTS // 4, "most were aborted in time"
