"""Recurrent states and latents in made-up tensors as vLLM 0.32 registers them, moved between sizes and layouts.

What arrives is compared with plain NumPy that knows how each rank of vLLM cuts its tensors; every number is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvferry.engines.vllm.layers import CachedLayer, State  # noqa: E402
from kvferry.engines.vllm.layout import merge_groups, read_groups, read_pieces, read_worker  # noqa: E402
from kvferry.engines.vllm.options import Options  # noqa: E402
from kvferry.engines.vllm.orders import LoadOrder, Orders, SendOrder  # noqa: E402
from kvferry.engines.vllm.scheduler import BlockTable  # noqa: E402
from kvferry.engines.vllm.states import Split, state_axes  # noqa: E402
from kvferry.engines.vllm.worker import WorkerSide, open_endpoint  # noqa: E402
from kvferry.errors import EngineError  # noqa: E402
from kvferry.layout.document import Instance  # noqa: E402
from kvferry.layout.validate import check_instance  # noqa: E402
from kvferry.session.registry import RegistryServer  # noqa: E402
from kvferry.transport.memory import HostMemory, map_array  # noqa: E402
from tests.engines.vllm.test_worker import until  # noqa: E402

BLOCKS, BLOCK_TOKENS, TOKENS, DIM = 12, 8, 27, 5
STATE_BLOCK = 3
"""The fourth block of 8 tokens holds the state after 26."""
OPTIONS = Options(lease_s=20.0, timeout_s=20.0, slots=2, slot_bytes=4096)


@dataclass(frozen=True)
class Model:
    """A recurrent layer of the whole model: sections of its convolution as (units, channels each), heads and the rest
    of its state; and as many KV heads.
    """

    kind: str
    sections: tuple[tuple[int, int], ...]
    state: tuple[int, ...]
    width: int = 3
    kv_heads: int = 4
    groups: int | None = None

    @property
    def channels(self) -> int:
        return sum(units * each for units, each in self.sections)


MAMBA2 = Model("state-mamba2", ((8, 6), (4, 2), (4, 2)), (8, 6, 2), groups=4)
SHARED = Model("state-mamba2", ((8, 6), (1, 2), (1, 2)), (8, 6, 2), groups=1)
GDN = Model("state-gdn_attn", ((4, 3), (4, 3), (8, 5)), (8, 5, 3))
MAMBA1 = Model("state-mamba1", ((16, 1),), (16, 3))
SHORT = Model("state-short_conv", ((16, 1),), ())


def conv_of(model: Model) -> np.ndarray[Any, Any]:
    """[channel, width], each number its own."""
    return np.arange(1, 1 + model.channels * model.width, dtype=np.float32).reshape(model.channels, model.width)


def ssm_of(model: Model) -> np.ndarray[Any, Any]:
    return np.arange(5000, 5000 + prod(model.state), dtype=np.float32).reshape(model.state)


def channels_of(model: Model, tp: int, rank: int) -> list[int]:
    """The channels of one rank: its share of each section, and all of a section of one unit that isn't cut."""
    found: list[int] = []
    first = 0
    for units, each in model.sections:
        cut = (0, units) if units == 1 < tp else (units * rank // tp, units * (rank + 1) // tp)
        found += range(first + cut[0] * each, first + cut[1] * each)
        first += units * each
    return found


@dataclass
class Rank:
    side: WorkerSide
    registry: str
    conv: Any
    ssm: Any
    keys: Any


def make_rank(
    model: Model, name: str, tp: int, rank: int, channels_first: bool, registry: str, options: Options = OPTIONS
) -> Rank:
    """One layer of attention and one of states that share their memory, as vLLM lays them over each other."""
    channels = channels_of(model, tp, rank)
    conv_shape = (len(channels), model.width) if channels_first else (model.width, len(channels))
    shapes = [conv_shape]
    if model.state:
        shapes.append((model.state[0] // tp, *model.state[1:]))
    states = tuple(State(shape, "float32") for shape in shapes)
    state_bytes = sum(prod(shape) * 4 for shape in shapes)
    heads = max(model.kv_heads // tp, 1)
    content_bytes = heads * BLOCK_TOKENS * 2 * DIM * 4
    page_bytes = max(state_bytes, content_bytes) + 64  # padded
    memory = torch.zeros(BLOCKS * page_bytes, dtype=torch.int8)
    raw = memory.as_strided((BLOCKS, 1, 1, state_bytes), (page_bytes, state_bytes, state_bytes, 1))
    inner = (page_bytes // 4, BLOCK_TOKENS * 2 * DIM, 2 * DIM, 1)
    kv = memory.view(torch.float32).as_strided((BLOCKS, heads, BLOCK_TOKENS, 2 * DIM), inner)
    layers = [
        CachedLayer("layers.0.mixer", 0, 0, model.kind, model.kind, 0, 0, 0, BLOCK_TOKENS, states),
        CachedLayer("layers.1.attn", 1, 1, "full", "FLASH_ATTN", heads, DIM, DIM, BLOCK_TOKENS),
    ]
    tensors = {"layers.0.mixer": raw, "layers.1.attn": kv}
    split = Split(rank, tp, model.kv_heads, model.groups, channels_first)
    pieces = read_pieces(layers, tensors, BLOCKS, split)
    groups = merge_groups([read_groups(pieces)])
    worker = read_worker(rank, pieces, groups)
    document = check_instance(Instance("kvferry-instance/1", name, "m", tuple(groups.values()), (worker,)))
    host = HostMemory([map_array(tensor) for tensor in tensors.values()])
    endpoint = open_endpoint(document, rank, host, tp, registry, options)
    side = WorkerSide(endpoint, groups, [BlockTable(c.kind, BLOCK_TOKENS) for c in layers], options)
    views = {piece.kind.partition(".")[2]: piece.views for piece in pieces}
    conv = views["conv"]["state"].tensor
    ssm = views["ssm"]["state"].tensor if model.state else None
    return Rank(side, registry, conv if channels_first else conv.transpose(1, 2), ssm, kv)


@contextmanager
def instance(model: Model, name: str, tp: int, channels_first: bool) -> Iterator[list[Rank]]:
    with RegistryServer() as registry, ExitStack() as opened:
        ranks = []
        for rank in range(tp):
            ranks.append(make_rank(model, name, tp, rank, channels_first, registry.url))
            opened.callback(ranks[-1].side.close)
        yield ranks


SENT, STATES = (7, 2, 9, 4), (0, 0, 0, 11)
INTO, STATES_INTO = (1, 8, 3, 6), (0, 0, 0, 10)


@pytest.mark.parametrize("model", [MAMBA2, SHARED, GDN, MAMBA1, SHORT], ids=lambda m: f"{m.kind}-{len(m.sections)}")
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)], ids=lambda s: f"tp{s[0]}-to-tp{s[1]}")
def test_f42_f43_each_section_of_a_state_is_cut_by_itself(model: Model, sizes: tuple[int, int]) -> None:
    """Whole groups or pieces of sections that stay behind would be seen: every number of every rank is compared."""
    with instance(model, "p", sizes[0], False) as prefill, instance(model, "d", sizes[1], True) as decode:
        conv, ssm = conv_of(model), ssm_of(model)
        for rank, one in enumerate(prefill):
            one.keys[list(SENT)] = torch.arange(one.keys[0].numel() * 4.0).reshape(4, *one.keys.shape[1:]) + 1000 * rank
            one.conv[STATES[STATE_BLOCK]] = torch.from_numpy(conv[channels_of(model, sizes[0], rank)])
            if model.state:
                one.ssm[STATES[STATE_BLOCK]] = torch.from_numpy(np.split(ssm, sizes[0])[rank])
        for one in prefill:
            one.side.submit(Orders(sends=(SendOrder("r", "p/r", TOKENS - 1, (STATES, SENT)),)))
        order = LoadOrder("d", "p/r", "p", prefill[0].registry, 0, TOKENS - 1, (STATES_INTO, INTO))
        for one in decode:
            one.side.submit(Orders(loads=(order,)))
        for one in decode:
            assert until(one, lambda ended: bool(ended.received)).failed == set()  # type: ignore[arg-type]
        for rank, one in enumerate(decode):
            expected = conv[channels_of(model, sizes[1], rank)]
            assert np.array_equal(one.conv[STATES_INTO[STATE_BLOCK]].numpy(), expected)
            if model.state:
                assert np.array_equal(one.ssm[STATES_INTO[STATE_BLOCK]].numpy(), np.split(ssm, sizes[1])[rank])
        written = torch.cat([one.keys[list(SENT)] for one in prefill], dim=1)
        got = torch.cat([one.keys[list(INTO)] for one in decode], dim=1)
        for block, count in enumerate((8, 8, 8, 2)):
            assert torch.equal(got[block, :, :count], written[block, :, :count])
            assert not got[block, :, count:].any()


def test_a_state_of_another_position_is_refused_by_the_source() -> None:
    with instance(GDN, "p", 1, False) as (source,), instance(GDN, "d", 1, False) as (target,):
        source.side.submit(Orders(sends=(SendOrder("r", "p/r", TOKENS - 1, (STATES, SENT)),)))
        order = LoadOrder("d", "p/r", "p", source.registry, 0, TOKENS - 2, (STATES_INTO, INTO))
        target.side.submit(Orders(loads=(order,)))
        assert until(target, lambda ended: bool(ended.received)).failed == {"d"}  # type: ignore[arg-type]
        assert not target.conv.any()


def cached(model: Model, *shapes: tuple[int, ...]) -> CachedLayer:
    states = tuple(State(shape, "float32") for shape in shapes)
    return CachedLayer("layers.0.mixer", 0, 0, model.kind, model.kind, 0, 0, 0, 8, states)


def test_a_convolution_owns_a_piece_of_every_section() -> None:
    conv, ssm = state_axes(cached(GDN, (3, 32), (4, 5, 3)), Split(1, 2, 4))
    assert conv.owned == {"channel": ((6, 12), (18, 24), (44, 64))} and conv.extents == {"channel": 64, "width": 3}
    assert ssm.owned == {"head": ((4, 8),)} and ssm.extents == {"head": 8, "value": 5, "key": 3}
    shared, _ = state_axes(cached(SHARED, (3, 28), (4, 6, 2)), Split(1, 2, 4, state_groups=1))
    assert shared.owned == {"channel": ((24, 52),)} and shared.extents["channel"] == 52


@pytest.mark.parametrize(
    ("layer", "split", "message"),
    [
        (cached(SHARED, (3, 28), (4, 6, 2)), Split(1, 2, 4), "names no number of state groups"),
        (cached(MAMBA2, (3, 29), (4, 6, 2)), Split(0, 1, 4), "is no convolution of x 24 | B | C"),
        (cached(MAMBA2, (3, 28)), Split(0, 1, 4), "state of a mamba2 layer with tensors of shape"),
        (replace(cached(MAMBA2, (3, 28)), kind="state-new"), Split(0, 1, 4), "the state of a new layer"),
    ],
)
def test_a_state_that_is_not_known_is_refused(layer: CachedLayer, split: Split, message: str) -> None:
    with pytest.raises(EngineError) as raised:
        state_axes(layer, split)
    assert message in str(raised.value)


def test_registered_bytes_must_be_those_of_the_state() -> None:
    layer = cached(MAMBA2, (3, 28), (4, 6, 2))
    with pytest.raises(EngineError, match=r"expected bytes \[blocks, 1, 1, 528\]"):
        read_pieces([layer], {layer.name: torch.zeros(4, 1, 1, 520, dtype=torch.int8)}, 4, Split(0, 1, 4))


@pytest.mark.parametrize("shape", [(BLOCKS, 1, BLOCK_TOKENS, 576), (BLOCKS, BLOCK_TOKENS, 576), (24, 1, 4, 576)])
def test_f40_a_latent_has_no_head_and_lies_whole_on_every_rank(shape: tuple[int, ...]) -> None:
    layer = CachedLayer("layers.0.attn", 0, 0, "latent", "MLA", 1, 576, 0, BLOCK_TOKENS)
    tensor = torch.arange(BLOCKS * BLOCK_TOKENS * 576, dtype=torch.float32).reshape(shape)
    pieces = read_pieces([layer], {layer.name: tensor}, BLOCKS, Split(1, 2, 1))
    (group,) = merge_groups([read_groups(pieces)]).values()
    assert (group.name, group.parts, group.axes) == ("latent", ("latent",), {"dim": 576})
    (pool,) = read_worker(1, pieces, {"latent": group}).pools
    assert pool.owned == {} and pool.page_tokens == BLOCK_TOKENS
    with pytest.raises(EngineError, match="expected 12 blocks of 8 tokens, 576 numbers each"):
        read_pieces([layer], {layer.name: tensor[..., :500]}, BLOCKS, Split(1, 2, 1))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=lambda s: f"tp{s[0]}-to-tp{s[1]}")
def test_f40_latents_are_taken_from_one_worker_and_kept_by_all(sizes: tuple[int, int]) -> None:
    def rank(name: str, tp: int, number: int, block_tokens: int, registry: str) -> tuple[WorkerSide, Any]:
        layer = CachedLayer("layers.0.attn", 0, 0, "latent", "MLA", 1, DIM, 0, block_tokens)
        tensor = torch.zeros(BLOCKS, 1, block_tokens, DIM)
        pieces = read_pieces([layer], {layer.name: tensor}, BLOCKS, Split(number, tp, 1))
        groups = merge_groups([read_groups(pieces)])
        worker = read_worker(number, pieces, groups)
        document = check_instance(Instance("kvferry-instance/1", name, "m", tuple(groups.values()), (worker,)))
        endpoint = open_endpoint(document, number, HostMemory([map_array(tensor)]), tp, registry, OPTIONS)
        return WorkerSide(endpoint, groups, [BlockTable("latent", block_tokens)], OPTIONS), tensor

    with RegistryServer() as one, RegistryServer() as other, ExitStack() as opened:
        prefill = [rank("p", sizes[0], number, 8, one.url) for number in range(sizes[0])]
        decode = [rank("d", sizes[1], number, 4, other.url) for number in range(sizes[1])]
        for side, _ in [*prefill, *decode]:
            opened.callback(side.close)
        latent = torch.arange(32 * DIM, dtype=torch.float32).reshape(4, 1, 8, DIM) + 1
        for side, tensor in prefill:
            tensor[list(SENT)] = latent
            side.submit(Orders(sends=(SendOrder("r", "p/r", TOKENS, (SENT,)),)))
        into = (1, 8, 3, 6, 2, 5, 7)
        for side, _ in decode:
            side.submit(Orders(loads=(LoadOrder("d", "p/r", "p", one.url, 0, TOKENS - 1, (into,)),)))
        bytes_taken = 0
        for side, tensor in decode:
            one_side: Any = Rank(side, "", None, None, None)
            assert until(one_side, lambda ended: bool(ended.received)).failed_blocks == set()
            bytes_taken += side.moved().received_bytes
            got = tensor[list(into)].reshape(-1, DIM)[: TOKENS - 1]
            assert torch.equal(got, latent.reshape(-1, DIM)[: TOKENS - 1])
        assert bytes_taken == sizes[1] * (TOKENS - 1) * DIM * 4
