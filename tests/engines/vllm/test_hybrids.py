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


@pytest.mark.long
@pytest.mark.parametrize("turned", [False, True], ids=["tp1-to-tp2", "tp2-to-tp1"])
def test_latents_cross_once_for_each_worker_that_keeps_them(latents: Pair, turned: bool) -> None:
    """Tokens are not compared: on CPUs vLLM computes a prompt by one kernel and an answer by another, and random
    weights make much of little. Which bytes go where is compared on made-up tensors (test_states, test_layout).
    """
    source, target = latents[::-1] if turned else latents
    for length in LENGTHS:
        prompt = prompt_of(length, 2000 + turned + length)
        loads = len(received(target))
        assert len(tokens_of(disaggregated(source, target, prompt))) == 24
        assert len(received(target)) > loads, f"{length} tokens: nothing was moved"
        assert received(target)[-1] == (length - 1) * 3 * 576 * 4
    idle(source, target)
