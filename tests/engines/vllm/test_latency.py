"""Latency of requests through prefill and decode: vLLM's NixlConnector and ours on real servers, turn and turn about.

One pair of servers at a time, since idle servers take processor time too: with both pairs up, each of them slows down
the other, and not equally.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    tokens_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1200)]

TURNS = ("stock", "ours", "ours", "stock", "stock", "ours")
WARM_UP, REQUESTS, TOKENS = 8, 24, 8
"""Requests of a turn that are not counted (the first shakes hands, and the stock connector needs some more to get to
its speed), those that are, and tokens of each answer.
"""


def stock(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


@contextmanager
def pair(name: str, model: Path, folder: Path) -> Iterator[tuple[Server, Server]]:
    made, servers = {"stock": stock, "ours": connector}[name], []
    with nothing_left(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,sm,self")
        patch.setenv("UCX_NET_DEVICES", "lo")
        try:
            for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
                patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
                options = ("--block-size", "32")
                servers.append(Server.of_model(f"{name}-{side}", model, folder, *options, connector=made(role)))
            prefill, decode = [server.ready() for server in servers]
            yield prefill, decode
        finally:
            for server in servers:
                server.close()


def turn(name: str, prompts: list[list[int]], model: Path, folder: Path) -> tuple[list[float], list[list[int]]]:
    """Milliseconds of each prompt from the question to prefill to the answer of decode, and what was answered."""
    folder.mkdir()
    times_ms, answers = [], []
    with pair(name, model, folder) as (prefill, decode):
        for prompt in prompts:
            began_s = time.monotonic()
            answers.append(tokens_of(disaggregated(prefill, decode, prompt, TOKENS)))
            times_ms.append(1000 * (time.monotonic() - began_s))
        # all but the last token of each prompt came from the other server, or all with the stock connector
        fetched = metric(decode, "vllm:external_prefix_cache_hits_total")
        assert fetched >= sum(len(prompt) - 1 for prompt in prompts)
        assert len(received(decode)) == (len(prompts) if name == "ours" else 0)
    return times_ms, answers


def test_no_slower_than_stock_by_more_than_the_noise(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For each request, by the median of three turns. The noise: how far the stock connector's turns of one request are
    apart, in the median of all requests.
    """
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed in this environment: the stock connector needs it")
    draw = random.Random(1)
    prompts = [[draw.randrange(1024) for _ in range(draw.randrange(100, 500))] for _ in range(WARM_UP + REQUESTS)]
    turns: dict[str, list[list[float]]] = {"stock": [], "ours": []}
    said: list[list[list[int]]] = []
    for number, name in enumerate(TURNS):
        times_ms, answers = turn(name, prompts, tiny_model, tmp_path / str(number))
        turns[name].append(times_ms[WARM_UP:])
        said.append(answers)
    assert all(answers == said[0] for answers in said), "the two do not say the same"
    noise_ms = statistics.median(max(three) - min(three) for three in zip(*turns["stock"]))
    requests = [
        (statistics.median(theirs), statistics.median(ours))
        for theirs, ours in zip(zip(*turns["stock"]), zip(*turns["ours"]))
    ]
    with capsys.disabled():
        for name, each in turns.items():
            medians = "".join(f"{statistics.median(one):9.1f}" for one in each)
            slowest = "".join(f"{max(one):9.1f}" for one in each)
            print(f"\n  {name:6} median of {REQUESTS} requests, ms: {medians}   slowest: {slowest}", end="")
        print(f"\n  noise of three turns: {noise_ms:.1f} ms; each request, median of three turns, ms (stock, ours):")
        print("\n".join(f"  {theirs:9.1f} {ours:9.1f}" for theirs, ours in requests))
    for number, (theirs, ours) in enumerate(requests):
        assert ours <= theirs + noise_ms, f"request {number}: {ours:.1f} ms, the stock connector {theirs:.1f}"
