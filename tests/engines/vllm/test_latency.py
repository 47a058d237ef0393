"""Latency of requests through prefill and decode on real servers: vLLM's NixlConnector and ours, turn about."""

from __future__ import annotations

import importlib.util
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.servers import (
    Server,
    connector,
    disaggregated,
    free_port,
    metric,
    nothing_left,
    received,
    signal_all,
    tokens_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

RUNS, REQUESTS, TURN, TOKENS = 3, 24, 4, 8
"""Counted runs, requests of a run with each connector, of a turn, and tokens of each answer."""
SETTLE_S = 0.3
Pair = tuple[Server, Server]
Times = dict[str, list[float]]


def stock(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


@pytest.fixture(scope="module")
def pairs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Prefill and decode with each connector."""
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed in this environment: the stock connector needs it")
    folder, servers = tmp_path_factory.mktemp("latency"), []
    with nothing_left(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,sm,self")
        patch.setenv("UCX_NET_DEVICES", "lo")
        for name, made in (("stock", stock), ("ours", connector)):
            for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
                patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
                options = ("--block-size", "32")
                servers.append(Server.of_model(f"{name}-{side}", tiny_model, folder, *options, connector=made(role)))
        try:
            ready = [server.ready() for server in servers]
            yield {"stock": (ready[0], ready[1]), "ours": (ready[2], ready[3])}
        finally:
            for server in servers:
                signal_all(server, signal.SIGCONT)
                server.close()


def take_turn(pairs: dict[str, Pair], name: str, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """Milliseconds of each prompt from the question to prefill to the answer of decode, and what was answered.

    The other servers stand still meanwhile: idle ones take processor time too, and not equally.
    """
    for other, pair in pairs.items():
        for server in pair:
            signal_all(server, signal.SIGCONT if other == name else signal.SIGSTOP)
    time.sleep(SETTLE_S)
    times_ms, answers = [], []
    for prompt in prompts:
        began_s = time.monotonic()
        answers.append(tokens_of(disaggregated(*pairs[name], prompt, TOKENS)))
        times_ms.append(1000 * (time.monotonic() - began_s))
    return times_ms, answers


def run(pairs: dict[str, Pair], prompts: list[list[int]]) -> Times:
    """Every prompt through each pair; turns are short, so that a machine that gets slower does so for both."""
    times: Times = {name: [] for name in pairs}
    for number, start in enumerate(range(0, len(prompts), TURN)):
        said = []
        for name in sorted(pairs, reverse=bool(number % 2)):
            times_ms, answers = take_turn(pairs, name, prompts[start : start + TURN])
            times[name] += times_ms
            said.append(answers)
        assert said[0] == said[1], "the two do not say the same"
    return times


def show(runs: list[Times], requests: list[tuple[float, float]], noise_ms: float) -> None:
    for name in runs[0]:
        medians = "".join(f"{statistics.median(one[name]):9.1f}" for one in runs)
        slowest = "".join(f"{max(one[name]):9.1f}" for one in runs)
        print(f"\n  {name:6} median of {REQUESTS} requests, ms: {medians}   slowest: {slowest}", end="")
    worst = max(ours - theirs for theirs, ours in requests)
    print(f"\n  each request by its median of {RUNS} runs: noise {noise_ms:.1f} ms, ours slower by {worst:.1f} at most")
    print("  stock, ours: " + ", ".join(f"{theirs:.0f} {ours:.0f}" for theirs, ours in requests))


def test_no_request_is_slower_than_stock_by_more_than_the_noise(
    pairs: dict[str, Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    """The noise: how far the stock connector's three runs of a request are apart, in the median of all requests.
    Request n has a prompt of the same length in each run, and a new one, since servers keep what they have computed.
    """
    draw = random.Random(1)
    lengths = [draw.randrange(100, 500) for _ in range(REQUESTS)]
    runs = [run(pairs, [[draw.randrange(1024) for _ in range(length)] for length in lengths]) for _ in range(1 + RUNS)]
    for name in pairs:
        take_turn(pairs, name, [])  # so that it can be asked
        fetched = metric(pairs[name][1], "vllm:external_prefix_cache_hits_total")
        assert fetched >= len(runs) * sum(length - 1 for length in lengths), f"{name} computed prompts on decode"
    assert len(received(pairs["ours"][1])) == len(runs) * REQUESTS
    runs = runs[1:]  # the first shakes hands
    each = {name: list(zip(*(one[name] for one in runs))) for name in pairs}
    noise_ms = statistics.median(max(three) - min(three) for three in each["stock"])
    requests = [
        (statistics.median(theirs), statistics.median(ours)) for theirs, ours in zip(each["stock"], each["ours"])
    ]
    with capsys.disabled():
        show(runs, requests, noise_ms)
    for number, (theirs, ours) in enumerate(requests):
        assert ours <= theirs + noise_ms, f"request {number}: {ours:.1f} ms, the stock connector {theirs:.1f}"
