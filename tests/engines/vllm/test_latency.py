"""Latency of requests through prefill and decode: NixlConnector and ours on real servers, turn and turn about."""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.servers import Server, connector, disaggregated, free_port, nothing_left, received, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

RUNS, REQUESTS, TOKENS = 3, 16, 8
Pair = tuple[Server, Server]


def stock(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


@pytest.fixture(scope="module")
def pairs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed in this environment: the stock connector needs it")
    folder, servers = tmp_path_factory.mktemp("latency"), []
    with nothing_left(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,sm,self")
        patch.setenv("UCX_NET_DEVICES", "lo")
        for name, made in (("stock", stock), ("ours", connector)):
            for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
                patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
                servers.append(
                    Server.of_model(f"{name}-{side}", tiny_model, folder, "--block-size", "32", connector=made(role))
                )
        try:
            ready = [server.ready() for server in servers]
            yield {"stock": (ready[0], ready[1]), "ours": (ready[2], ready[3])}
        finally:
            for server in servers:
                server.close()


def test_no_slower_than_stock_by_more_than_the_noise(
    pairs: dict[str, Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    medians: dict[str, list[float]] = {name: [] for name in pairs}
    for run in range(1 + RUNS):  # the first shakes hands and is not counted
        seconds: dict[str, list[float]] = {name: [] for name in pairs}
        for _ in range(REQUESTS):
            prompt = [draw.randrange(1024) for _ in range(draw.randrange(100, 500))]
            answers = set()
            for name in sorted(pairs, reverse=bool(draw.randrange(2))):
                began_s = time.monotonic()
                answers.add(tuple(tokens_of(disaggregated(*pairs[name], prompt, TOKENS))))
                seconds[name].append(time.monotonic() - began_s)
            assert len(answers) == 1, "the two do not say the same"
        for name, values in seconds.items():
            if run:
                medians[name].append(statistics.median(values))
    assert len(received(pairs["ours"][1])) == (1 + RUNS) * REQUESTS
    middle = {name: statistics.median(values) for name, values in medians.items()}
    noise_s = max(max(values) - min(values) for values in medians.values())
    with capsys.disabled():
        for name, values in medians.items():
            print(f"\n  {name:6}" + "".join(f"{value * 1000:9.1f} ms" for value in values), end="")
        print(f"\n  medians of {REQUESTS} requests in {RUNS} runs; ratio {middle['ours'] / middle['stock']:.2f}")
    assert middle["ours"] <= middle["stock"] + noise_s
