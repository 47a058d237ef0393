"""SGLang's own calls, on pools whose addresses have bit 63 set, compared byte by byte (F1, F2, F36).

Equal sizes and slices take one path in kvferry; in the code where this was seen they were two, and each had the fault.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
pytest.importorskip("sglang", reason="sglang is not importable")

import torch  # noqa: E402

from tests.engines.sglang.rig import (  # noqa: E402
    _ARENAS,
    BASE,
    DIM,
    GUARD,
    LAYERS,
    UNTOUCHED,
    Arena,
    Rank,
    Rig,
    open_rig,
)

SUCCESS = 4
SOURCE_ROW, TARGET_ROW = 2, 5


def pages_of(page: int, tokens: int, seed: int) -> list[int]:
    """Page ids in a shuffled order, never SGLang's padding page 0."""
    return (1 + np.random.default_rng(seed).permutation(256 // page)[: -(-tokens // page)]).tolist()


def fill(rig: Rig, source_pages: list[int], tokens: int) -> None:
    for rank in rig.prefill:
        rank.fill(source_pages, range(tokens), SOURCE_ROW)
    for rank in rig.decode:
        rank.arena.bytes[:] = UNTOUCHED


def wrong_bytes(rig: Rig, source_pages: list[int], target_pages: list[int], tokens: range) -> int:
    """Over every pool of both sides, guards and padding included, after `tokens` were to be moved."""
    count = 0
    for ranks, pages, held, row in (
        (rig.prefill, source_pages, range(tokens.stop), SOURCE_ROW),
        (rig.decode, target_pages, tokens, TARGET_ROW),
    ):
        for rank in ranks:
            found = rank.arena.bytes.copy()
            rank.fill(pages, held, row)
            count += int(np.count_nonzero(found != rank.arena.bytes))
    return count


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (1, 8), (8, 1)])
def test_every_byte_lands(model: Path, free_port: int, sizes: tuple[int, int], page: int) -> None:
    with open_rig(model, *sizes, page, free_port) as rig:
        assert all(pointer >= 1 << 63 for rank in [*rig.prefill, *rig.decode] for pointer in rank.args().kv_data_ptrs)
        for room, (tokens, prefix) in enumerate([(80, 0), (96, 32), (160, 0)]):
            source_pages, target_pages = pages_of(page, tokens, room), pages_of(page, tokens, room + 100)
            fill(rig, source_pages, tokens)
            states, senders, _ = rig.move(room, source_pages, target_pages, prefix // page, (SOURCE_ROW, TARGET_ROW))
            assert states == {SUCCESS}
            moved = sum(sender.get_transfer_metric().transfer_total_bytes for sender in senders)
            row_bytes = sum(rig.decode[0].args().aux_item_lens) * len(rig.decode)
            heads = sum(len(rank.heads) for rank in rig.decode)
            assert moved == (tokens - prefix) * LAYERS * 2 * heads * DIM * 4 + row_bytes  # the prefix stayed (F36)
            missing = target_pages[prefix // page :]
            assert wrong_bytes(rig, source_pages, missing, range(prefix, tokens)) == 0


def signed(pointer: int, index: int, stride: int) -> int:
    """The mistake: an address in a signed 64-bit integer."""
    return int(np.array([pointer], np.uint64).astype(np.int64)[0] + np.int64(index) * np.int64(stride))


def mixed(pointer: int, index: int, stride: int) -> int:
    """The other one: NumPy adds uint64 and int64 as floats."""
    return int(np.uint64(pointer) + np.int64(index) * np.int64(stride))


def exact(pointer: int, index: int, stride: int) -> int:
    return pointer + index * stride


Arithmetic = Callable[[int, int, int], int]


def move_by(rig: Rig, source_pages: list[int], target_pages: list[int], address: Arithmetic) -> None:
    """A stock engine's way: pointer + index · stride for each layer, part, token and shared head, and for each row."""
    for target in rig.decode:
        for source in rig.prefill:
            heads = [head for head in target.heads if head in source.heads]
            for here, there in zip(source.args().kv_data_ptrs, target.args().kv_data_ptrs):
                for at in range(len(source_pages) * source.page):
                    for head in heads:
                        copy(
                            (source, address(here, slot(source, source_pages, at, head), DIM * 4)),
                            (target, address(there, slot(target, target_pages, at, head), DIM * 4)),
                            DIM * 4,
                        )
        source, theirs, ours = rig.prefill[0], rig.prefill[0].args(), target.args()
        for here, there, item in zip(theirs.aux_data_ptrs, ours.aux_data_ptrs, ours.aux_item_lens):
            copy((source, address(here, SOURCE_ROW, item)), (target, address(there, TARGET_ROW, item)), item)


def slot(rank: Rank, pages: list[int], at: int, head: int) -> int:
    """Index of one head of one token, counted in heads."""
    token = pages[at // rank.page] * rank.page + at % rank.page
    return token * len(rank.heads) + head - rank.heads.start


def copy(source: tuple[Rank, int], target: tuple[Rank, int], nbytes: int) -> None:
    views = []
    for rank, address in (source, target):
        if not BASE <= address <= BASE + len(rank.arena.bytes) - nbytes:
            raise LookupError(f"nothing lies at {address:#x}")
        views.append(rank.arena.bytes[address - BASE : address - BASE + nbytes])
    views[1][:] = views[0]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_the_comparison_sees_the_mistake(model: Path, free_port: int, sizes: tuple[int, int]) -> None:
    """The same bytes, moved with signed and with mixed arithmetic: the test above would have failed."""
    with open_rig(model, *sizes, 16, free_port) as rig:
        tokens = 32
        source_pages, target_pages = pages_of(16, tokens, 1), pages_of(16, tokens, 2)

        def wrong(arithmetic: Arithmetic) -> int:
            fill(rig, source_pages, tokens)
            move_by(rig, source_pages, target_pages, arithmetic)
            return wrong_bytes(rig, source_pages, target_pages, range(tokens))

        assert wrong(exact) == 0
        assert wrong(mixed) > 0
        with pytest.raises(LookupError, match="nothing lies at -0x"):
            wrong(signed)


def test_guards_are_there(model: Path, free_port: int) -> None:
    with open_rig(model, 1, 1, 16, free_port) as rig:
        args: Any = rig.prefill[0].args()
        buffers = sorted(zip(args.kv_data_ptrs + args.aux_data_ptrs, args.kv_data_lens + args.aux_data_lens))
        gaps = [after - (pointer + nbytes) for (pointer, nbytes), (after, _) in itertools.pairwise(buffers)]
        assert min(gaps) >= GUARD - 16


def test_an_arena_that_nobody_closed_is_forgotten() -> None:
    """Else a later one that gets its memory would say of half its buffers that they are where others are."""
    arena = Arena(1 << 20)
    start, tensor = arena.bytes.ctypes.data, arena.tensor((4,), torch.float32)
    assert tensor.data_ptr() == BASE + GUARD
    del arena
    gc.collect()
    assert start in _ARENAS, "a tensor still has the memory"
    del tensor
    gc.collect()
    assert start not in _ARENAS
