"""What goes wrong in real processes ends in a typed error before the deadline, and holds no slot without doubt."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from kvferry.errors import (
    DocumentError,
    IncompatibleError,
    KeysError,
    PeerLost,
    TransferAborted,
    TransferRefused,
    TransferTimeout,
)
from kvferry.session.endpoint import Endpoint
from kvferry.transport.memory import HostMemory, map_array
from tests.session.crew import Crew, Member, RemoteError, every, open_all, open_pair, start
from tests.session.pools import Shape, WorkerPool, instance
from tests.session.test_endpoint import cross

TOKENS = (0, 40)


def error_of(member: Member, name: str, *args: object, **options: object) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        member(name, *args, **options)
    return caught.value


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.01)


def all_free(*members: Member) -> Callable[[], bool]:
    return lambda: all(member("stats")["slots_free"] == 4 for member in members)


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"model": "other"}, "model", ("synthetic", "other")),
        ({"layers": 2}, "groups.attn.layers", ("(0, 1, 2)", "(0, 1)")),
        ({"heads": 8}, "groups.attn.axes", ("'head': 4", "'head': 8")),
    ],
)
def test_f18_f37_incompatible_instances_fail_at_the_handshake(
    crew: Crew, registry: str, change: dict[str, object], field: str, values: tuple[str, str]
) -> None:
    pair = open_pair(crew, registry, Shape(), replace(Shape(), **change))  # type: ignore[arg-type]
    error = error_of(pair.targets[0], "connect", pair.source, timeout_s=10.0)
    assert error.kind is IncompatibleError
    assert error.text.startswith(f"{field}: source has ")
    assert all(value in error.text for value in values)
    start(pair, "t", (0, 8))
    error = error_of(pair.targets[0], "wait", "t")
    assert error.kind is TransferRefused
    assert field in error.text
    assert error_of(pair.sources[0], "wait", "t").kind is TransferRefused, "the source is told, it need not wait"


def test_connect_then_transfer(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1))
    pair.targets[0]("connect", pair.source, timeout_s=10.0)
    assert pair.targets[0]("stats")["peers"] == 2
    assert pair.targets[0]("poll") == []
    cross(pair)


def test_timeout_of_an_unmatched_receive(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    began_s = time.monotonic()
    pair.targets[0]("receive", "t", pair.source, [0, 1], 0, (0, 8), 0.5)
    error = error_of(pair.targets[0], "wait", "t")
    assert time.monotonic() - began_s < 3
    assert error.kind is TransferTimeout
    assert "transfer 't' with " + pair.source in error.text
    assert "phase matching" in error.text
    assert pair.targets[0]("untouched")
    until(all_free(*pair.targets))


def test_an_id_that_the_source_never_sends_ends_early_where_it_is_always_sent_first(crew: Crew, registry: str) -> None:
    source, target = crew.take(2)
    source("open", "first", Shape(), 0, registry, early_s=0.3)
    target("open", "second", Shape(), 0, registry)
    began_s = time.monotonic()
    target("receive", "t", "first", [0, 1], 0, (0, 8), 30.0)
    error = error_of(target, "wait", "t")
    assert time.monotonic() - began_s < 5
    assert error.kind is TransferRefused
    assert "no send() came here within 0.3 s: it has ended, or this instance knows no such id" in error.text
    assert target("untouched")


def test_timeout_while_an_instance_is_missing_a_rank(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    pair.targets[0]("receive", "t", "nobody", [0, 1], 0, (0, 8), 0.5)
    error = error_of(pair.targets[0], "wait", "t")
    assert error.kind is TransferTimeout
    assert "phase preparing" in error.text
    assert "instance 'nobody' has no registered worker" in error.text


@pytest.mark.parametrize("side", ["source", "target"])
def test_abort_in_the_middle(side: str, crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=2, page_tokens=6), slot_bytes=64)
    every(pair.sources, "slow", 0.05)
    start(pair, "t", TOKENS)
    until(lambda: pair.targets[0]("stats")["slots_used"] > 0)
    victim = (pair.sources if side == "source" else pair.targets)[1]
    victim("abort", "t", "the user went away")
    for member in pair.sources + pair.targets:
        error = error_of(member, "wait", "t")
        assert error.kind is TransferAborted
        assert "the user went away" in error.text
    until(all_free(*pair.targets))
    assert [s["slots_quarantined"] for s in every(pair.targets, "stats")] == [0, 0]


def test_f56_source_killed_in_the_middle(crew: Crew, registry: str) -> None:
    """Nothing leaks, and nobody waits for the deadline."""
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=2), slot_bytes=64)
    every(pair.sources, "slow", 0.05)
    start(pair, "t", TOKENS, timeout_s=50)
    until(lambda: pair.targets[1]("stats")["slots_used"] > 0)
    began_s = time.monotonic()
    pair.sources[1].kill()
    errors = [error_of(member, "wait", "t") for member in [*pair.targets, pair.sources[0]]]
    assert time.monotonic() - began_s < 5
    assert {error.kind for error in errors} == {PeerLost}
    assert all(f"{pair.source}/" in error.text or pair.target in error.text for error in errors)
    until(all_free(*pair.targets))


def test_target_killed_in_the_middle(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=1), Shape(tp=2), slot_bytes=64)
    every(pair.sources, "slow", 0.05)
    start(pair, "t", TOKENS, timeout_s=50)
    until(lambda: pair.targets[1]("stats")["slots_used"] > 0)
    pair.targets[1].kill()
    assert error_of(pair.sources[0], "wait", "t").kind is PeerLost
    assert error_of(pair.targets[0], "wait", "t").kind is PeerLost
    until(all_free(pair.targets[0]))


def test_f51_f57_a_stopped_source_costs_slots_and_never_a_page(crew: Crew, registry: str) -> None:
    """The deadline ends the request, not the quarantine; a continued writer can't reach the pages."""
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    source("slow", 0.02)
    start(pair, "t", TOKENS, timeout_s=1.5)
    until(lambda: target("stats")["slots_used"] > 0)
    source.signal(signal.SIGSTOP)
    try:
        error = error_of(target, "wait", "t")
        assert error.kind is TransferTimeout
        assert "phase moving" in error.text
        stats = target("stats")
        assert stats["slots_quarantined"] > 0
        assert stats["slots_free"] + stats["slots_quarantined"] == 4
        target("fill", list(range(16)), 0, (0, 64))  # the pages now belong to somebody else
        other = crew.take(3)[2]
        open_all([other], "another", Shape(), registry, slots=4, slot_bytes=64)
        other("fill", [3, 4], 0, (0, 8))
        other("send", "u", [3, 4], 0, (0, 8), 10.0)
        target("receive", "u", "another", [3, 4], 0, (0, 8), 10.0)
        target("wait", "u")
    finally:
        source.signal(signal.SIGCONT)
    until(all_free(target))
    assert target("wrong_words_of", [(list(range(16)), 0, (0, 64)), ([3, 4], 0, (0, 8))]) == 0
    assert error_of(source, "wait", "t").kind is TransferTimeout


def test_f51_with_direct_landing_a_stopped_source_holds_its_pages(crew: Crew, registry: str) -> None:
    """The deadline ends the request; only the writer's own word, or its death, gives the pages back."""
    pair = open_pair(crew, registry, Shape(), Shape(), landing="pages", transport="process_vm")
    (source,), (target,) = pair.sources, pair.targets
    start(pair, "good", TOKENS)
    target("wait", "good")
    assert target("pages_free", "good")
    source("slow", 0.5)
    start(pair, "t", TOKENS, timeout_s=1.0)
    until(lambda: source("stats")["transfers_sending"] == 1)
    time.sleep(0.2)  # it is in the middle of its write, and stays there
    source.signal(signal.SIGSTOP)
    try:
        assert error_of(target, "wait", "t").kind is TransferTimeout
        assert not target("pages_free", "t")
        assert target("stats")["pieces_quarantined"] > 0
        time.sleep(1.0)
        assert not target("pages_free", "t"), "time is no fence"
    finally:
        source.signal(signal.SIGCONT)
    until(lambda: target("pages_free", "t"))
    assert target("stats")["pieces_quarantined"] == 0
    start(pair, "u", TOKENS, timeout_s=1.0)
    time.sleep(0.2)
    source.kill()
    assert error_of(target, "wait", "u").kind is PeerLost
    until(lambda: target("pages_free", "u"))


def test_one_slow_source_delays_nobody(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    fast = crew.take(3)[2]
    open_all([fast], "fast", Shape(), registry, slots=4, slot_bytes=64)
    source("slow", 0.3)
    start(pair, "t", (0, 8))
    until(lambda: target("stats")["slots_used"] > 0)
    began_s = time.monotonic()
    fast("fill", [3, 4], 0, (0, 8))
    fast("send", "u", [3, 4], 0, (0, 8), 10.0)
    target("receive", "u", "fast", [3, 4], 0, (0, 8), 10.0)
    target("wait", "u")
    assert time.monotonic() - began_s < 3.0, "the slow transfer takes longer than that"
    target("abort", "t", "")


def test_f64_a_restarted_prefill_is_usable_at_once(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1))
    cross(pair, transfer="before")
    open_all(pair.sources, pair.source, pair.source_shape, registry, slots=4, slot_bytes=1024)
    cross(pair, transfer="after")


def test_f65_junk_stops_nothing_and_is_counted(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    address = pair.targets[0]("address")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    for junk in (b"", b"junk", b"\x94\x01\xc0\xc0\xc0", b"\xdd\xff\xff\xff\xff"):
        stranger.send(junk)
    stranger.send_multipart([b"two", b"frames"])
    host, _, port = address.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    until(lambda: pair.targets[0]("stats")["refused_messages"] == 5)
    stranger.close(linger=0)
    context.term()
    start(pair, "t", (0, 8))
    assert pair.targets[0]("wait", "t").bytes == 8 * 4 * 4 * 4 * 3 * 2


def test_an_idle_endpoint_uses_no_cpu(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    cross(pair)
    before_s = pair.targets[0]("cpu_s")
    time.sleep(1.0)
    assert pair.targets[0]("cpu_s") - before_s < 0.05


def test_f63_no_descriptor_leaks(crew: Crew, registry: str) -> None:
    counts = []
    for _ in range(4):
        pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1))
        cross(pair)
        counts.append(pair.targets[0]("descriptors"))
    assert counts[1:] == counts[1:2] * 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1"])
def test_f69_a_host_other_than_loopback_is_refused(host: str, registry: str) -> None:
    pool = WorkerPool(Shape(), 0)
    document = instance("p", Shape(), (pool.worker(),))
    memory = HostMemory([map_array(pool.bytes_view)])
    with pytest.raises(KeysError, match=r"only loopback.*kvferry keys"):
        Endpoint(document, 0, memory, world=1, registry=registry, host=host)


def test_ids_and_closed_endpoints(registry: str) -> None:
    pool = WorkerPool(Shape(), 0)
    document = instance("solo", Shape(), (pool.worker(),))
    with Endpoint(document, 0, HostMemory([map_array(pool.bytes_view)]), world=1, registry=registry) as endpoint:
        from kvferry.layout.request import Wanted
        from tests.session.pools import table

        transfer = endpoint.send("a", {"attn": Wanted((0, 4))}, table([0]), timeout_s=30)
        with pytest.raises(TransferRefused, match="ids are unique"):
            endpoint.send("a", {"attn": Wanted((0, 4))}, table([0]), timeout_s=30)
        with pytest.raises(TransferTimeout, match="still running"):
            endpoint.wait(transfer, timeout_s=0.05)
        assert transfer.state == "running"
    with pytest.raises(TransferAborted, match="the endpoint was closed"):
        endpoint.wait(transfer)
    with pytest.raises(TransferRefused, match="closed"):
        endpoint.send("b", {}, table([0]), timeout_s=1)


@pytest.mark.parametrize("side", ["source", "target"])
def test_an_endpoint_that_closes_tells_its_peers(side: str, crew: Crew, registry: str) -> None:
    """The process lives on, so no death is seen; still nobody waits and no slot stays in doubt."""
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    every(pair.sources, "slow", 0.05)
    start(pair, "t", TOKENS, timeout_s=50)
    (source,), (target,) = pair.sources, pair.targets
    until(lambda: target("stats")["slots_used"] > 0)
    began_s = time.monotonic()
    closed, other = (source, target) if side == "source" else (target, source)
    closed("close")
    assert error_of(other, "wait", "t").kind in (TransferAborted, PeerLost)
    until(all_free(other))
    until(lambda: other("stats")["peers"] == 0)
    assert time.monotonic() - began_s < 5


def test_an_instance_does_not_receive_from_itself(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    pair.targets[0]("receive", "t", pair.target, [0], 0, (0, 4), 10.0)
    error = error_of(pair.targets[0], "wait", "t")
    assert error.kind is TransferRefused
    assert "own instance" in error.text


@pytest.mark.parametrize(("rank", "world"), [(1, 2), (0, 0), (-1, 1)])
def test_a_rank_outside_instance_or_world_is_refused(rank: int, world: int, registry: str) -> None:
    pool = WorkerPool(Shape(), 0)
    document = instance("p", Shape(), (pool.worker(),))
    with pytest.raises(DocumentError, match="rank: expected a worker of 'p' below world"):
        Endpoint(document, rank, HostMemory([map_array(pool.bytes_view)]), world=world, registry=registry)


def test_a_process_that_forgets_to_close_still_ends(registry: str) -> None:
    code = (
        "from kvferry import Endpoint, HostMemory, map_array\n"
        "from tests.session.pools import Shape, WorkerPool, instance\n"
        "pool = WorkerPool(Shape(), 0)\n"
        "memory = HostMemory([map_array(pool.bytes_view)])\n"
        f"Endpoint(instance('p', Shape(), (pool.worker(),)), 0, memory, world=1, registry={registry!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_f66_a_source_gives_only_what_it_owns(crew: Crew, registry: str) -> None:
    """A target that asks rank 0 for rank 1's heads is refused, and nothing of it lands."""
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1))
    pair.targets[0]("ask_for_heads", 2, 4)
    start(pair, "t", (0, 8))
    error = error_of(pair.targets[0], "wait", "t")
    assert error.kind is TransferRefused
    assert "head" in error.text
    for member in pair.sources:
        assert error_of(member, "wait", "t").kind is TransferRefused
    until(all_free(*pair.targets))


def test_f52_pages_that_were_given_back_are_never_read(crew: Crew, registry: str) -> None:
    """A claim after the source's limit is refused, whatever lies in those pages now."""
    pair = open_pair(crew, registry, Shape(), Shape())
    (source,), (target,) = pair.sources, pair.targets
    source("fill", [1, 2], 0, (0, 8))
    source("send", "t", [1, 2], 0, (0, 8), 0.3)
    assert error_of(source, "wait", "t").kind is TransferTimeout
    source("fill", [1, 2], 8, (8, 16))  # another request's tokens
    target("receive", "t", pair.source, [3, 4], 0, (0, 8), 20.0)
    error = error_of(target, "wait", "t")
    assert error.kind is TransferTimeout
    assert f"{pair.source}/" in error.text and "says: the deadline of 0.3 s has passed" in error.text
    assert target("untouched")


def test_f54_a_request_that_cannot_be_planned_ends_on_both_sides(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    (source,), (target,) = pair.sources, pair.targets
    began_s = time.monotonic()
    source("send", "t", [1, 2], 0, (0, 8), 50.0)
    target("receive", "t", pair.source, [3], 0, (0, 8), 50.0)  # a page short
    assert error_of(target, "wait", "t").kind is TransferRefused
    error = error_of(source, "wait", "t")
    assert error.kind is TransferRefused
    assert f"{pair.target}/" in error.text
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(("side", "kind"), [("target", "Offer"), ("source", "ChunkDone"), ("target", "Complete")])
def test_f55_a_lost_message_wedges_nobody(side: str, kind: str, crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    (pair.sources if side == "source" else pair.targets)[0]("lose", kind)
    began_s = time.monotonic()
    cross(pair)
    assert time.monotonic() - began_s < 6
    assert sum(stats["messages_repeated"] for stats in every(pair.sources + pair.targets, "stats")) > 0


def test_f56_an_abort_while_the_peer_is_away_frees_the_pages_at_once(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    source("slow", 0.02)
    start(pair, "t", TOKENS, timeout_s=50)
    until(lambda: target("stats")["slots_used"] > 0)
    source.signal(signal.SIGSTOP)
    try:
        target("abort", "t", "the user went away")
        assert error_of(target, "wait", "t").kind is TransferAborted
        assert target("pages_free", "t")
    finally:
        source.kill()
    until(all_free(target))


def test_f61_a_source_that_registers_after_it_was_asked_for_is_found(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2), Shape())
    every(pair.sources, "close")
    (target,) = pair.targets
    target("receive", "t", pair.source, [3, 4], 0, (0, 8), 20.0)
    time.sleep(0.3)  # asked for, and not there
    open_all(pair.sources, pair.source, pair.source_shape, registry, slots=4, slot_bytes=1024)
    every(pair.sources, "fill", [1, 2], 0, (0, 8))
    every(pair.sources, "send", "t", [1, 2], 0, (0, 8), 20.0)
    target("wait", "t")
    assert target("wrong_words", [3, 4], 0, (0, 8)) == 0


def test_f62_one_rank_that_registers_twice_is_no_instance_of_two(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2), Shape())
    pair.sources[1]("open", pair.source, pair.source_shape, 0, registry)
    pair.targets[0]("receive", "t", pair.source, [3, 4], 0, (0, 8), 0.5)
    error = error_of(pair.targets[0], "wait", "t")
    assert error.kind is TransferTimeout
    assert f"instance '{pair.source}' misses rank(s) 1 of 2" in error.text
