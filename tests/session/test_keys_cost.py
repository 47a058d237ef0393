"""What keys and digests cost, beside the same without. Printed, not judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest

from kvferry.session.keys import Keys
from kvferry.session.registry import Entry, Registry, RegistryServer
from tests.session.crew import Crew, Member, open_all
from tests.session.deployment import deployment
from tests.session.pools import DIM, Shape

ONE, TWO = deployment("one", "two")
SHAPE = Shape(heads=32, pages=512, page_tokens=16)
PAGES = list(range(SHAPE.pages))
LARGE_BYTES = SHAPE.pages * SHAPE.page_tokens * SHAPE.layers * 2 * SHAPE.heads * DIM * 4
WAIT_S = 60.0


@pytest.mark.slow
def test_what_keys_cost(crew: Crew, capsys: pytest.CaptureFixture[str]) -> None:
    ways = {
        "neither": (None, None, False),
        "keys": (ONE, TWO, False),
        "digests": (None, None, True),
        "keys and digests": (ONE, TWO, True),
    }
    rows: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for turn in range(3):
        for number, (way, options) in enumerate(ways.items()):
            rows[way].append(measure(crew, f"{turn}-{number}", *options))
    with capsys.disabled():
        print("\nmedian of 3 turns, tcp on loopback")
        for way, found in rows.items():
            registry_ms, connect_ms, small_ms, large = (median(column) for column in zip(*found))
            print(
                f"{way:16}  registry request {registry_ms:.2f} ms  handshake {connect_ms:.1f} ms  "
                f"transfer of one page {small_ms:.2f} ms  of {LARGE_BYTES >> 20} MiB {large:.0f} MB/s"
            )
    assert all(len(found) == 3 for found in rows.values())


def measure(
    crew: Crew, name: str, source_keys: Keys | None, target_keys: Keys | None, digest: bool
) -> tuple[float, float, float, float]:
    """Milliseconds per registry request, per handshake and per small transfer; MB/s of large ones."""
    source, target = crew.take(2)
    with RegistryServer(keys=source_keys) as registry:
        client = Registry(registry.url, keys=target_keys)
        entry = Entry("idle", 1, 0, 1, "tcp://127.0.0.1:9", target_keys.public if target_keys else "")
        registry_ms = timed_ms(50, lambda _: client.put(entry, 60))
        options = {"transport": "tcp", "slots": 8, "slot_bytes": 1 << 20, "digest": digest}
        open_all([source], f"p-{name}", SHAPE, registry.url, keys=source_keys, **options)
        open_all([target], f"d-{name}", SHAPE, registry.url, keys=target_keys, **options)
        connect_ms = timed_ms(1, lambda _: target("connect", f"p-{name}", WAIT_S))
        one(source, target, name, "warm", 1)
        small_ms = timed_ms(100, lambda i: one(source, target, name, f"small-{i}", 1))
        one(source, target, name, "warm-large", SHAPE.pages)
        large_ms = timed_ms(5, lambda i: one(source, target, name, f"large-{i}", SHAPE.pages))
        crew.rest()
    return registry_ms, connect_ms, small_ms, LARGE_BYTES / large_ms / 1e3


def one(source: Member, target: Member, name: str, transfer: str, pages: int) -> None:
    """One transfer of so many pages, waited for on both sides."""
    tokens = (0, pages * SHAPE.page_tokens)
    source("send", transfer, PAGES[:pages], 0, tokens, WAIT_S)
    target("receive", transfer, f"p-{name}", PAGES[:pages], 0, tokens, WAIT_S)
    assert target("wait", transfer).bytes == LARGE_BYTES * pages // SHAPE.pages
    source("wait", transfer)


def timed_ms(count: int, call: Callable[[int], object]) -> float:
    started_s = time.perf_counter()
    for i in range(count):
        call(i)
    return (time.perf_counter() - started_s) / count * 1e3
