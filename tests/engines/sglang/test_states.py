"""What is kept beside keys and values, on SGLang's own pools: sliding windows, recurrent state, index keys, latents.

Through the plugin's managers, senders and receivers, with the ids that SGLang's schedulers pass; every byte compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
pytest.importorskip("sglang", reason="sglang is not importable")

from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402

from tests.engines.sglang.rig import UNTOUCHED, Request, Rig, State, open_rig  # noqa: E402
from tests.engines.sglang.servers import free_ports  # noqa: E402
from tests.engines.sglang.shapes import Shape  # noqa: E402

WINDOW = 24


@pytest.fixture
def port() -> Iterator[int]:
    yield free_ports(1)[0]


def up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def some(count: int, last: int, seed: int) -> list[int]:
    """Ids in a shuffled order, never SGLang's padding id 0."""
    return (1 + np.random.default_rng(seed).permutation(last - 1)[:count]).tolist()


@dataclass
class Move:
    """A request with its states on both sides, and what the pages hold before and after it."""

    request: Request
    source: dict[str, State] = field(default_factory=dict)
    target: dict[str, State] = field(default_factory=dict)


def plan(rig: Rig, room: int, tokens: int, prefix: int = 0) -> Move:
    """By hand what the schedulers compute: ids of the last window, of every page, or of one slot."""
    source_page, target_page = rig.prefill[0].page, rig.decode[0].page
    kv_source = some(up(tokens, source_page) // source_page, 256 // source_page, room)
    kv_target = some(up(tokens, target_page) // target_page, 256 // target_page, room + 50)
    move = Move(Request(room, tokens, kv_source, kv_target, prefix=prefix, window=WINDOW))
    for kind in rig.prefill[0].manager.state_names:
        if kind == "mamba":
            source, target = ([some(1, 8, room + n)[0]] for n in (2, 3))
            move.source[kind], move.target[kind] = (source, range(1), 0), (target, range(1), 0)
        else:
            reach = WINDOW if kind == "swa" else tokens
            first = max(0, tokens - reach) // source_page * source_page
            first_target = max(prefix, tokens - reach) // target_page * target_page
            stop, stop_target = up(tokens, source_page), up(tokens, target_page)
            ids = some((stop - first) // source_page, 128 // source_page + 1, room + 2)
            ids_target = some((stop_target - first_target) // target_page, 128 // target_page + 1, room + 3)
            move.source[kind] = (ids, range(first, stop), first)
            both = range(max(first, first_target), min(stop, stop_target))
            move.target[kind] = (ids_target, both, first_target)
    move.request.source_states = {kind: state[0] for kind, state in move.source.items()}
    move.request.target_states = {kind: state[0] for kind, state in move.target.items()}
    return move


def wrong_bytes(rig: Rig, move: Move) -> int:
    """Runs the request; wrong bytes of both sides, guards and padding included."""
    request = move.request
    source_page, target_page = rig.prefill[0].page, rig.decode[0].page
    stop = min(up(request.tokens, source_page), up(request.tokens, target_page))
    whole = range(up(request.tokens, source_page))
    missing = request.target_pages[request.prefix // target_page :]
    for rank in rig.prefill:
        rank.fill(request.source_pages, whole, request.rows[0], move.source)
    for rank in rig.decode:
        rank.arena.bytes[:] = UNTOUCHED
    states, senders, receivers = rig.run_request(request)
    for side in (*senders, *receivers):
        if side.poll() == KVPoll.Failed:
            side.failure_exception()
    assert states == {KVPoll.Success}
    count = 0
    for ranks, args in (
        (rig.prefill, (request.source_pages, whole, request.rows[0], move.source)),
        (rig.decode, (missing, range(request.prefix, stop), request.rows[1], move.target)),
    ):
        for rank in ranks:
            found = rank.arena.bytes.copy()
            rank.fill(*args)
            count += int(np.count_nonzero(found != rank.arena.bytes))
    for side in (*senders, *receivers):
        side.clear()
    return count


SIZES = [(1, 1), (1, 2), (2, 1), (4, 2)]


PAGES = [(16, 16), (1, 16), (16, 1), (4, 6)]
# every size with one pair of pages; the other pairs in `make test-engines-long`
WINDOWS = [
    pytest.param(sizes, pages, marks=[] if i == j else pytest.mark.long)
    for i, sizes in enumerate(SIZES)
    for j, pages in enumerate(PAGES)
]


@pytest.mark.parametrize(("sizes", "pages"), WINDOWS)
def test_sliding_window(model: Path, port: int, sizes: tuple[int, int], pages: tuple[int, int]) -> None:
    """F44: windows that begin inside a page, that are as long as the prompt, or shorter than a chunk."""
    with open_rig(model, *sizes, pages[0], port, decode_page=pages[1], shape=Shape("sliding")) as rig:
        for room, tokens in enumerate((5, WINDOW, 41, 96)):
            assert wrong_bytes(rig, plan(rig, room, tokens)) == 0, f"{tokens} tokens"
        assert wrong_bytes(rig, plan(rig, 9, 96, prefix=4 * pages[1])) == 0


@pytest.mark.parametrize("sizes", SIZES)
def test_recurrent_state(model: Path, port: int, sizes: tuple[int, int]) -> None:
    """F42, F43: the convolution's channels are q | k | v of unequal width, each cut over the ranks."""
    with open_rig(model, *sizes, 16, port, shape=Shape("gated")) as rig:
        for room, tokens in enumerate((5, 41, 96)):
            assert wrong_bytes(rig, plan(rig, room, tokens)) == 0, f"{tokens} tokens"


@pytest.mark.parametrize("sizes", SIZES)
def test_latents(model: Path, port: int, sizes: tuple[int, int]) -> None:
    """F40: whole on every rank, and sent once to each."""
    with open_rig(model, *sizes, 16, port, shape=Shape("latent")) as rig:
        for room, tokens in enumerate((5, 41)):
            assert wrong_bytes(rig, plan(rig, room, tokens)) == 0, f"{tokens} tokens"


@pytest.mark.parametrize("sizes", SIZES)
def test_index_keys(model: Path, port: int, sizes: tuple[int, int]) -> None:
    """Keys and scales of sparse attention; a layer that has none of its own."""
    with open_rig(model, *sizes, 64, port, shape=Shape("index")) as rig:
        for room, tokens in enumerate((5, 100, 128)):
            assert wrong_bytes(rig, plan(rig, room, tokens)) == 0, f"{tokens} tokens"
        assert wrong_bytes(rig, plan(rig, 9, 128, prefix=64)) == 0


def test_a_state_that_is_not_named_fails_the_request(model: Path, port: int) -> None:
    with open_rig(model, 1, 1, 16, port, shape=Shape("gated")) as rig:
        request = plan(rig, 0, 41).request
        rank = rig.decode[0]
        ids: Any = rank.manager.state_names
        rank.manager.state_names = []
        (receiver,) = rig.receive(request, [rank])
        assert receiver.poll() == KVPoll.Failed
        with pytest.raises(Exception, match="group conv: SGLang names no page of it"):
            receiver.failure_exception()
        rank.manager.state_names = ids
        assert wrong_bytes(rig, plan(rig, 1, 41)) == 0
