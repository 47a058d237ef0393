"""Real processes that are paused, restarted or cut off: noticed soon, named, and a burden to nobody else."""

from __future__ import annotations

import signal
import time

import pytest

from kvferry.errors import PeerLost, TransferTimeout
from kvferry.session import delivery
from kvferry.session.registry import Registry
from tests.session.crew import Crew, Member, open_all, open_pair, start
from tests.session.pools import Shape
from tests.session.test_endpoint import cross
from tests.session.test_failures import TOKENS, all_free, error_of, until


def another(crew: Crew, name: str, registry: str, **options: object) -> Member:
    member = crew.take(3)[2]
    open_all([member], name, Shape(), registry, slots=4, slot_bytes=64, **options)  # type: ignore[arg-type]
    return member


def fetch(source: Member, name: str, target: Member, transfer: str, timeout_s: float = 10.0) -> float:
    """Eight tokens; how long that took."""
    began_s = time.monotonic()
    source("fill", [3, 4], 0, (0, 8))
    source("send", transfer, [3, 4], 0, (0, 8), timeout_s)
    target("receive", transfer, name, [3, 4], 0, (0, 8), timeout_s)
    target("wait", transfer)
    return time.monotonic() - began_s


@pytest.mark.slow
def test_f57_a_paused_source_is_noticed_and_delays_nobody_else(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    fast = another(crew, "fast", registry)
    fetch(fast, "fast", target, "warm")
    source("slow", 0.02)
    start(pair, "t", TOKENS, timeout_s=12)
    until(lambda: target("stats")["slots_used"] > 0)
    source.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        took_s = []
        while not target("stats")["peers_silent"]:
            assert time.monotonic() - began_s < delivery.SILENT_S + 2 * delivery.BEAT_S
            took_s.append(fetch(fast, "fast", target, f"u{len(took_s)}"))
        assert time.monotonic() - began_s >= delivery.SILENT_S - 0.5
        assert len(took_s) > 3
        assert max(took_s) < 1.0, "the paused one delays it"
        target("receive", "t2", pair.source, [1, 2], 0, (0, 8), 1.0)
        error = error_of(target, "wait", "t2")
        assert error.kind is TransferTimeout
        assert f"no word from {pair.source}/" in error.text
        assert target("stats")["transfers_receiving"] == 1, "silence alone ends nothing"
    finally:
        source.signal(signal.SIGCONT)
    target("wait", "t")
    assert target("stats")["peers_silent"] == 0
    until(all_free(target))


def test_f64_a_restart_that_nobody_witnessed_is_used_at_once(crew: Crew, registry: str) -> None:
    """The earlier start is only paused, as a host that is cut off would be: its slots stay aside until it answers."""
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    source("slow", 0.05)
    start(pair, "t", TOKENS, timeout_s=50)
    until(lambda: target("stats")["slots_used"] > 0)
    source.signal(signal.SIGSTOP)
    try:
        (before,) = Registry(registry).instance(pair.source).workers
        again = another(crew, pair.source, registry)
        until(lambda: Registry(registry).instance(pair.source).workers != (before,))
        assert fetch(again, pair.source, target, "u") < 2.0
        error = error_of(target, "wait", "t")
        assert error.kind is PeerLost
        assert f"it has been started again, as {pair.source}/" in error.text
        stats = target("stats")
        assert stats["slots_quarantined"] > 0
        assert stats["slots_free"] + stats["slots_quarantined"] == 4
    finally:
        source.signal(signal.SIGCONT)
    until(all_free(target))
    until(lambda: target("stats")["peers"] == 1)
    fetch(again, pair.source, target, "v")


@pytest.mark.slow
def test_f64_what_waits_for_a_start_that_is_gone_ends_when_the_next_one_is_there(crew: Crew, registry: str) -> None:
    """Nothing else is asked of the new start: the transfer itself looks for it."""
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    target("connect", pair.source, timeout_s=10.0)
    source.signal(signal.SIGSTOP)
    try:
        target("receive", "t", pair.source, [1, 2], 0, (0, 8), 40.0)
        another(crew, pair.source, registry)
        began_s = time.monotonic()
        error = error_of(target, "wait", "t")
        assert error.kind is PeerLost
        assert f"it has been started again, as {pair.source}/" in error.text
        assert time.monotonic() - began_s < 12
    finally:
        source.signal(signal.SIGCONT)


@pytest.mark.slow
def test_waiting_for_a_peer_costs_little(crew: Crew, registry: str) -> None:
    """Beats go on while something runs: under 3 % of one core on either side."""
    pair = open_pair(crew, registry, Shape(), Shape())
    cross(pair)
    pair.targets[0]("receive", "t2", pair.source, [1, 2], 0, (0, 8), 20.0)
    until(lambda: pair.sources[0]("stats")["offers_waiting"] == 1)
    assert max(member("cpu_while_idle", 3.0) for member in (*pair.sources, *pair.targets)) < 0.03
    pair.targets[0]("abort", "t2", "")
