"""Models that cache more than keys and values: recurrent states beside attention, and latent attention."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
from tests.engines.vllm.tiny import write_latent_model, write_state_model

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTHS = (2, 3, 60, 128, 129, 130, 257, 400)
Pair = tuple[Server, Server]


@contextmanager
def pair_of(write: Callable[[Path], Path], base: pytest.TempPathFactory, name: str, *one: str) -> Iterator[Pair]:
    """One worker and two; each computes prompts and takes them from the other. `one`: options of the first."""
    model, folder = write(base.mktemp(name)), base.mktemp("servers")
    with nothing_left():
        servers = [
            Server.of_model(
                f"{name}-{tp}", model, folder, "--tensor-parallel-size", tp, *more, connector=connector("kv_both")
            )
            for tp, more in (("1", one), ("2", ()))
        ]
        try:
            yield servers[0].ready(), servers[1].ready()
        finally:
            for server in servers:
                server.close()


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The first keeps one state per request. The second has a prefix cache, and so a state per block of 128 tokens:
    there vLLM 0.32 on CPUs can't compute prompts of more than a block itself (IndexError in its own mixer).
    """
    with pair_of(write_state_model, tmp_path_factory, "states", "--no-enable-prefix-caching") as pair:
        yield pair


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(write_latent_model, tmp_path_factory, "latents") as pair:
        yield pair


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1024) for _ in range(length)]


def all_equal(source: Server, target: Server, seed: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    answers = set()
    for length in lengths:
        prompt, loads = prompt_of(length, seed + length), len(received(target))
        answer = tokens_of(disaggregated(source, target, prompt))
        assert len(received(target)) > loads, f"{length} tokens: nothing was moved, so nothing was compared"
        assert answer == tokens_of(source.complete(prompt)), f"{length} tokens"
        answers.add(tuple(answer))
    assert len(answers) == len(lengths), "the model says the same whatever it is asked: the comparison sees nothing"
    idle(source, target)


@pytest.mark.parametrize("turned", [False, True], ids=["tp1-to-tp2", "tp2-to-tp1"])
def test_recurrent_states_arrive_with_their_position(states: Pair, turned: bool) -> None:
    source, target = states[::-1] if turned else states
    all_equal(source, target, 1000 + turned, tuple(n for n in LENGTHS if n <= 128) if turned else LENGTHS)


def test_what_moves_of_a_state_does_not_grow_with_the_prompt(states: Pair) -> None:
    source, target = states
    sizes = []
    for length in (60, 61):
        disaggregated(source, target, prompt_of(length, 77 + length))
        sizes.append(sum(received(target)[-2:]))
    attention = 2 * 4 * 32 * 4  # one layer of K and V of one token
    conv, ssm = 3 * (512 + 2 * 2 * 16) * 4, 16 * 32 * 16 * 4
    assert sizes == [59 * attention + 3 * (conv + ssm), 60 * attention + 3 * (conv + ssm)]


def test_a_state_of_another_position_is_not_used(states: Pair) -> None:
    source, target = states
    prompt = prompt_of(100, 9)
    params = {**prefill(source, prompt), "remote_num_tokens": 98}
    answer = target.complete(prompt, kv_transfer_params=params)
    assert "choices" not in answer or answer["choices"][0]["finish_reason"] == "error", answer
    assert re.search(r"remote_num_tokens: prefill's states are after 98 tokens, those after 99", target.text())
    assert tokens_of(disaggregated(source, target, prompt)) == tokens_of(source.complete(prompt))


def test_a_prompt_of_one_token_has_no_state_before_it(states: Pair) -> None:
    source, target = states
    asked = source.complete([5], 1, kv_transfer_params=dict(ASK_PREFILL))
    assert tokens_of(asked) and not asked.get("kv_transfer_params")
    assert tokens_of(target.complete([5])) == tokens_of(source.complete([5]))


LATENT_LENGTHS = (2, 16, 17, 130, 400)
"""A block holds 16 tokens: vLLM's CPU kernel knows no other."""
LATENT_BYTES = 3 * 576 * 4
"""3 layers, 512 + 64 float32 numbers: of one token, on each worker."""


@pytest.mark.parametrize("turned", [False, True], ids=["tp1-to-tp2", "tp2-to-tp1"])
def test_latents_cross_once_for_each_worker_that_keeps_them(latents: Pair, turned: bool) -> None:
    source, target = latents[::-1] if turned else latents
    loads = len(received(target))
    all_equal(source, target, 2000 + turned, LATENT_LENGTHS)
    expected = [(length - 1) * LATENT_BYTES for length in LATENT_LENGTHS]
    workers = 1 if turned else 2
    assert received(target)[loads:] == [size for size in expected for _ in range(workers)]


@pytest.mark.long
def test_latents_give_the_tokens_of_a_plain_server(tmp_path: Path) -> None:
    """One worker each; and the server that they are compared with knows nothing of kvferry."""
    model, one = write_latent_model(tmp_path / "model"), ("--tensor-parallel-size", "1")
    configs = {"plain": None, "prefill": connector("kv_producer"), "decode": connector("kv_consumer")}
    with nothing_left():
        servers = [Server.of_model(name, model, tmp_path, *one, connector=config) for name, config in configs.items()]
        try:
            plain, source, target = (server.ready() for server in servers)
            for length in LATENT_LENGTHS:
                prompt = prompt_of(length, 3000 + length)
                assert tokens_of(disaggregated(source, target, prompt)) == tokens_of(plain.complete(prompt)), length
            assert received(target) == [(length - 1) * LATENT_BYTES for length in LATENT_LENGTHS]
            idle(source, target)
        finally:
            for server in servers:
                server.close()


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 20])
def test_why_the_latent_model_scales_its_positions(tokens: int) -> None:
    """vLLM 0.32's CPU kernel for unscaled rotary positions reads `[token, head, dim]`, which latent attention gives it,
    as `[token, dim]`: of the rows of all tokens and heads it turns the first `tokens`, and keys as if they lay side by
    side. So of a prompt the first key only is right, and of an answer, computed token by token, each is. Where this
    test fails, vLLM was mended, and the tiny model needs no scaled positions.
    """
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    heads, dim, latent = 8, 64, 512
    draw = torch.Generator().manual_seed(tokens)
    angles = torch.outer(torch.arange(1024.0), 10_000 ** (-torch.arange(0, dim, 2) / dim))
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(500, 500 + tokens)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        even, odd = rows[..., 0::2], rows[..., 1::2]
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    query = torch.randn(tokens, heads, 32 + dim, generator=draw)[..., 32:]
    keys = torch.randn(tokens, latent + dim, generator=draw)[:, latent:].unsqueeze(1)
    rows = query.reshape(-1, 1, dim)
    as_read = torch.cat([turned(rows[:tokens]), rows[tokens:]]).view(query.shape)
    right, right_keys = turned(query), turned(keys)
    _custom_ops.rotary_embedding(positions, query, keys, dim, torch.cat([cos, sin], -1), False)
    assert torch.allclose(query, as_read, atol=1e-4) and not torch.allclose(query, right, atol=0.1)
    wrong = (keys - right_keys).abs().amax((1, 2)) > 0.1
    assert wrong.tolist() == [False] + [True] * (tokens - 1)
