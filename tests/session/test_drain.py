"""A worker that is drained ends what runs, takes nothing new and says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
import urllib.request

from kvferry.errors import TransferRefused
from kvferry.session.registry import Registry
from tests.session.crew import Crew, open_pair, start
from tests.session.pools import Shape, page_list
from tests.session.test_failures import TOKENS, error_of, until


def test_running_transfers_end_and_new_ones_are_refused_at_once(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape(), slot_bytes=64)
    (source,), (target,) = pair.sources, pair.targets
    target("receive", "early", pair.source, [8, 9], 0, (0, 8), 30.0)
    source("slow", 0.02)
    pages = start(pair, "t", TOKENS, timeout_s=30)
    ours = sorted(set(range(16)) - set(page_list(Shape(), TOKENS, 0, seed=1)))[:2]
    theirs = sorted(set(range(16)) - set(pages))[:2]
    source("fill", ours, 0, (0, 8))
    source("send", "later", ours, 0, (0, 8), 30.0)
    until(lambda: target("stats")["slots_used"] > 0)
    source("begin_drain", 30.0)
    until(lambda: any(worker.draining for worker in Registry(registry).instance(pair.source).workers))
    error = error_of(target, "wait", "early")
    assert error.kind is TransferRefused
    assert "is draining and takes no new transfers" in error.text
    assert f"with {pair.source}/" in error.text
    began_s = time.monotonic()
    target("receive", "new", pair.source, [8, 9], 0, (0, 8), 30.0)
    assert "is draining" in error_of(target, "wait", "new").text
    assert time.monotonic() - began_s < 2.0, "it is refused, it doesn't time out"
    refused = error_of(source, "send", "too late", [9, 10], 0, (0, 8), 30.0)
    assert refused.kind is TransferRefused
    assert "is draining" in refused.text
    target("receive", "later", pair.source, theirs, 0, (0, 8), 30.0)
    target("wait", "later")
    target("wait", "t")
    assert target("wrong_words_of", [(pages, 0, TOKENS), (theirs, 0, (0, 8))]) == 0
    assert source("end_drain") is True, "all of it has ended by itself"
    assert "no registered worker" in Registry(registry).instance(pair.source).missing


def test_a_drain_ends_at_its_own_deadline(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    (source,), (target,) = pair.sources, pair.targets
    source("send", "t", [9, 10], 0, (0, 8), 300.0)
    target("receive", "u", pair.source, [9, 10], 0, (0, 8), 300.0)
    began_s = time.monotonic()
    source("begin_drain", 0.5)
    assert source("end_drain") is False
    assert 0.5 <= time.monotonic() - began_s < 4.0
    assert "the endpoint was closed" in error_of(source, "wait", "t").text


def test_sigterm_drains_and_ends_the_process(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    (target,) = pair.targets
    code = f"""
        import time
        from kvferry import Endpoint, HostMemory, map_array
        from kvferry.session.drain import drain_on_sigterm
        from tests.session.pools import Shape, page_list, WorkerPool, instance, table
        from tests.session.sim import TOKENS
        pool = WorkerPool(Shape(), 0)
        memory = HostMemory([map_array(pool.bytes_view)])
        pool.fill([0, 1], 0, (0, 8))
        document = instance("own-{pair.source}", Shape(), (pool.worker(),))
        with Endpoint(document, 0, memory, world=1, registry={registry!r}) as endpoint:
            drain_on_sigterm([endpoint], timeout_s=20)
            endpoint.send("t", TOKENS, table([0, 1]), timeout_s=20)
            print("ready", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        name = f"own-{pair.source}"
        until(lambda: any(worker.draining for worker in Registry(registry).instance(name).workers))
        assert process.poll() is None, "a transfer runs still"
        target("receive", "t", name, [3, 4], 0, (0, 8), 20.0)
        target("wait", "t")
        assert target("wrong_words", [3, 4], 0, (0, 8)) == 0
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_sigterm_ends_a_registry_in_good_order() -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "registry", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("registry at ").strip()
        with urllib.request.urlopen(f"{url}/v1/instances/p", timeout=5) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()
