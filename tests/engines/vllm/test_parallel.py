"""Pipeline stages, which are workers of one instance with layers of their own; and data-parallel ranks, which are
instances of their own behind one address.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.vllm.servers import (
    ASK_PREFILL,
    Server,
    connector,
    disaggregated,
    idle,
    nothing_left,
    prefill,
    received,
    tokens_of,
)
from tests.engines.vllm.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

LENGTHS = (2, 6, 32, 33, 200, 500)
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4
"""4 layers of K and V, 4 heads of 32 float32 numbers."""
STAGES = (1, 3)
"""Layers of each stage; it has two tensor-parallel workers."""
# vLLM 0.32 on CPUs prepares what a later stage gets from the one before only where the model is warmed up, which
# `--enforce-eager` leaves out: its first request then ends the server (AssertionError in its model runner)
WARMED_UP = ("--no-enforce-eager", "--compilation-config", '{"mode": 3, "backend": "eager"}')


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Each is ended with the module."""
    model, folder = write_tiny_model(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("servers")

    def start(name: str, *options: str) -> Server:
        config = None if name == "plain" else connector("kv_both")
        return Server.of_model(name, model, folder, "--block-size", "32", *options, connector=config)

    with nothing_left():
        found = [start("plain"), start("one"), start("ranks", "--data-parallel-size", "2")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, STAGES)))
            found.append(start("stages", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", *WARMED_UP))
        try:
            yield {server.name: server.ready() for server in found}
        finally:
            for server in found:
                server.close()


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(1024) for _ in range(length)]


@pytest.mark.parametrize("turned", [False, True], ids=["pp2-tp2-to-one", "one-to-pp2-tp2"])
def test_stages_move_their_own_layers(servers: dict[str, Server], turned: bool) -> None:
    source, target = (servers[name] for name in (("one", "stages") if turned else ("stages", "one")))
    for length in LENGTHS:
        prompt, loads = prompt_of(length, 10 + turned), len(received(target))
        answer = tokens_of(disaggregated(source, target, prompt))
        assert answer == tokens_of(servers["plain"].complete(prompt)), f"{length} tokens"
        size = (length - 1) * TOKEN_BYTES
        by_worker = [size // 4 * layers // 2 for layers in STAGES for _ in range(2)]
        assert sorted(received(target)[loads:]) == (sorted(by_worker) if turned else [size])
    idle(source, target)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_data_parallel_rank_is_an_instance(servers: dict[str, Server], rank: int) -> None:
    """The router need not know of ranks: what a rank answers names that rank."""
    here = {"X-data-parallel-rank": str(rank)}
    one, ranks, plain = (servers[name] for name in ("one", "ranks", "plain"))
    for length in LENGTHS:
        prompt = prompt_of(length, 20 + rank)
        asked = ranks.complete(prompt, 1, headers=here, kv_transfer_params=dict(ASK_PREFILL))
        params: dict[str, Any] = asked["kv_transfer_params"]
        assert params["remote_engine_id"].endswith(f"_dp{rank}")
        expected = tokens_of(plain.complete(prompt))
        assert tokens_of(one.complete(prompt, kv_transfer_params=params)) == expected, f"{length} tokens"
        assert received(one)[-1] == (length - 1) * TOKEN_BYTES
        prompt = prompt_of(length, 30 + rank)
        expected = tokens_of(plain.complete(prompt))
        taken = ranks.complete(prompt, headers=here, kv_transfer_params=prefill(one, prompt))
        assert tokens_of(taken) == expected, f"{length} tokens"
        assert received(ranks)[-1] == (length - 1) * TOKEN_BYTES
    idle(one)
