"""The probe on NumPy pools that stand for an engine's: each layout written as stated passes, any other is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engines.probe import check_written, tags
from kvferry.errors import EngineError
from kvferry.layout.document import Group, Worker
from kvferry.layout.request import Side, Table
from kvferry.layout.tensors import pool_of
from kvferry.transport.memory import HostMemory, map_array

GROUP = Group("attn", "token", "uint8", (0,), ("k",), {"head": 4, "dim": 8})
HEADS = {"head": [(2, 4)]}
SIDE = Side({"attn": Table((2,))})


def probe(stated: tuple[str, ...], written: str) -> None:
    """Write page 2 of an engine's pool [page, token, head, dim] or with K transposed, described as `stated`."""
    shape = {"token": 3, "head": 2, "dim": 8}
    order = {"nhd": ("token", "head", "dim"), "transposed": ("head", "dim", "token")}[written]
    memory = np.zeros((4, *(shape[axis] for axis in order)), np.uint8)
    values = tags((3, 2, 8), 1, seed=5)
    memory[2] = values if written == "nhd" else values.transpose(1, 2, 0)
    described = memory.reshape(4, *(shape[axis] for axis in stated))
    region, pool = pool_of(described, ("page", *stated), GROUP, layers=(0,), parts=("k",), owned=HEADS)
    worker = Worker(0, (region,), (pool,))
    check_written(worker, GROUP, HostMemory([map_array(memory)]), SIDE, (0, 3), {(0, "k"): values})


def test_what_lies_where_the_layout_says_passes() -> None:
    probe(("token", "head", "dim"), "nhd")
    probe(("head", "dim", "token"), "transposed")


@pytest.mark.parametrize(
    ("stated", "written"),
    [
        (("token", "head", "dim"), "transposed"),
        (("head", "token", "dim"), "nhd"),
        (("head", "dim", "token"), "nhd"),
        (("head", "token", "dim"), "transposed"),
    ],
)
def test_any_other_order_is_refused(stated: tuple[str, ...], written: str) -> None:
    with pytest.raises(EngineError, match=r"layer 0, part k: .*not where its layout says, first at token"):
        probe(stated, written)


def test_the_refusal_shows_the_layout_and_what_was_found() -> None:
    with pytest.raises(EngineError) as refused:
        probe(("token", "head", "dim"), "transposed")
    text = str(refused.value)
    assert "page 0 at byte 0 of the region, pages 48 bytes apart; token × 3: +16, head × 2: +8, dim × 8: +1" in text
    assert "value [0, 0, 0] at byte 96; from there [1, 0, 0] at +1, [0, 1, 0] at +24, [0, 0, 1] at +3" in text


def test_another_count_of_heads_is_refused() -> None:
    memory = np.zeros((4, 3, 2, 8), np.uint8)
    region, pool = pool_of(memory, ("page", "token", "head", "dim"), GROUP, layers=(0,), parts=("k",), owned=HEADS)
    values = tags((3, 4, 8), 1, seed=5)
    with pytest.raises(EngineError, match=r"the layout holds {'head': 2, 'dim': 8} of 3 tokens, the engine writes"):
        worker = Worker(0, (region,), (pool,))
        check_written(worker, GROUP, HostMemory([map_array(memory)]), SIDE, (0, 3), {(0, "k"): values})


@pytest.mark.parametrize(("item_bytes", "kind"), [(2, np.float16), (4, np.float32)])
def test_tags_are_different_normal_numbers(item_bytes: int, kind: type) -> None:
    drawn = tags((16, 4, 32), item_bytes, seed=1)
    assert drawn.shape == (16, 4, 32)
    assert len(np.unique(drawn)) == drawn.size
    numbers = np.abs(drawn.view(kind))
    assert np.isfinite(numbers).all() and (numbers >= np.finfo(kind).tiny).all()
    assert (tags((16, 4, 32), item_bytes, seed=2) != drawn).any()


def test_more_tags_than_a_byte_has_values() -> None:
    drawn = tags((100, 10), 1, seed=1)
    assert set(np.unique(drawn)) == set(range(0x08, 0x7C))
