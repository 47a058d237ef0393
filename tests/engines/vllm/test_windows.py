"""A model of which most layers keep a window only: vLLM spreads its layers over several block tables that share memory,
and frees the blocks that have left the window.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engines.vllm.servers import (
    ASK_PREFILL,
    Server,
    connector,
    disaggregated,
    idle,
    nothing_left,
    received,
    tokens_of,
)
from tests.engines.vllm.tiny import WINDOW, write_window_model

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTHS = (20, 64, 96, 100, 150, 200, 300, 500)
FULL_TOKEN_BYTES = 2 * 4 * 32 * 4
"""One layer of K and V, 4 heads of 32 float32 numbers."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Blocks of 32 tokens on the prefill side, of 64 on the decode side."""
    model, folder = write_window_model(tmp_path_factory.mktemp("window")), tmp_path_factory.mktemp("servers")
    with nothing_left():
        servers = [
            Server.of_model(name, model, folder, "--block-size", block, connector=connector("kv_both"))
            for name, block in (("prefill", "32"), ("decode", "64"))
        ]
        try:
            yield servers[0].ready(), servers[1].ready()
        finally:
            for server in servers:
                server.close()


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1024) for _ in range(length)]


def test_tokens_equal_and_only_the_window_is_moved(pair: tuple[Server, Server]) -> None:
    source, target = pair
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        answer = tokens_of(disaggregated(source, target, prompt))
        assert answer == tokens_of(source.complete(prompt)), f"{length} tokens"
        window = min(length - 1, WINDOW - 1)
        assert received(target)[-1] == (length - 1 + 3 * window) * FULL_TOKEN_BYTES
    idle(source, target)


def test_a_window_that_was_cut_too_short_is_computed_again(pair: tuple[Server, Server]) -> None:
    """159 tokens: the window of token 158 begins with token 95, and vLLM has freed 96 tokens."""
    source, target = pair
    prompt, loads = prompt_of(159, 1), len(received(target))
    asked = source.complete(prompt, 1, kv_transfer_params=dict(ASK_PREFILL))
    assert tokens_of(asked) and not asked.get("kv_transfer_params")
    assert tokens_of(target.complete(prompt)) == tokens_of(source.complete(prompt))
    assert len(received(target)) == loads
    idle(source, target)
