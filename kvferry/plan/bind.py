"""Bind: a program and page tables → copies. Broadcasting only, no Python loop over pages, tokens or layers.

Wanted tokens become runs; runs are cut at both sides' page borders, so each segment is affine on both sides; segments
of equal length are one broadcast. Runs that are adjacent on both sides are merged before the buffers multiply them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import PlanError
from kvferry.layout.address import U64, Addresses, join
from kvferry.layout.request import Table
from kvferry.plan.order import BLOCK
from kvferry.plan.program import DensePlace, Fold, Piece, PoolPlace, Program, local_tokens
from kvferry.plan.route import Cycle

Index = npt.NDArray[np.int64]
"""Token positions, page numbers and counts: small numbers, never addresses."""


@dataclass(frozen=True)
class Copies:
    """Copy i moves `lengths[i]` bytes from `source[i]` to `target[i]`; all of one flat length."""

    source: Addresses
    target: Addresses
    lengths: U64

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum(dtype=np.uint64))


@dataclass(frozen=True)
class Segments:
    """Tokens cut so that each segment is affine on both sides: in-region offsets of its first token and its token
    count.
    """

    source: U64
    target: U64
    tokens: Index


@dataclass(frozen=True)
class Pages:
    """A page table as an array: -1 is a page that doesn't exist."""

    numbers: Index
    start: int


def page_array(table: Table) -> Pages:
    try:
        return Pages(table.numbers, table.start)
    except OverflowError:
        raise PlanError(
            f"a page table names a page number of 2**63 or more: {max(p or 0 for p in table.pages)}"
        ) from None


def token_runs(tokens: tuple[int, int], cycles: Sequence[Cycle]) -> tuple[Index, Index]:
    """Runs (start, length) of the tokens in [start, stop) that pass every cycle."""
    start, stop = tokens
    if stop <= start:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts, lengths = np.array([start], np.int64), np.array([stop - start], np.int64)
    for rank, size, block in cycles:
        if size > 1:
            starts, lengths = _cut(starts, lengths, starts, block)
            mine = starts // block % size == rank
            starts, lengths = starts[mine], lengths[mine]
    return starts, lengths


def _cut(starts: Index, lengths: Index, phase: Index, unit: int) -> tuple[Index, Index]:
    """Cut runs wherever `phase + distance from the run's start` is a multiple of `unit`."""
    run, begin, cut = _cuts(lengths, phase, unit)
    return starts[run] + begin, cut


def _cuts(lengths: Index, phase: Index, unit: int) -> tuple[Index, Index, Index]:
    """The same as (run, distance from its start, length) of each part."""
    lead = phase % unit
    count = (lead + lengths + unit - 1) // unit
    run = np.repeat(np.arange(len(lengths)), count)
    step = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.maximum(step * unit - lead[run], 0)
    end = np.minimum((step + 1) * unit - lead[run], lengths[run])
    return run, begin, end - begin


def bind_tokens(program: Program, tokens: tuple[int, int], source: Pages | None, target: Pages | None) -> Segments:
    """Cut the box's tokens at both sides' borders and find them in the page tables; PlanError for a page that isn't
    there.
    """
    starts, lengths = token_runs(tokens, program.source.box.cycles)
    if not len(starts):  # nothing is wanted, so no page is needed
        empty = np.empty(0, np.uint64)
        return Segments(empty, empty, lengths)
    sides = ((program.source, source), (program.target, target))
    local = [_local(place, pages, starts, lengths) for place, pages in sides]
    for side, (place, _) in enumerate(sides):
        if isinstance(place, DensePlace) and place.tokens.unit >= place.tokens_in:
            continue  # one block
        run, begin, lengths = _cuts(lengths, local[side], place.tokens.unit)
        starts, *local = (positions[run] + begin for positions in (starts, *local))
    s, t = (_locate(place, pages, starts, at) for (place, pages), at in zip(sides, local))
    return Segments(s, t, lengths)


def _local(place: PoolPlace | DensePlace, pages: Pages | None, starts: Index, lengths: Index) -> Index:
    """Position of each run in the worker's page table, in tokens, checked to lie inside it; or in the chunk."""
    if isinstance(place, DensePlace):
        return np.cumsum(lengths) - lengths
    where = f"group {place.group.name}, worker {place.rank}, table {place.pool.table_name}"
    if pages is None:
        raise PlanError(f"{where}: the request has no such page table")
    rank, size, block = place.pool.cycle
    if size > 1:
        # the place of a token that another rank holds is the place of one of ours
        foreign = (starts // block % size != rank) | (starts % block + lengths > block)
        if foreign.any():
            token = int(starts[np.flatnonzero(foreign)[0]])
            raise PlanError(
                f"{where}: tokens from {token} on are wanted, it owns only those of cycle {[rank, size, block]}"
            )
    local = local_tokens(starts, place.pool.cycle) - pages.start // size
    room = len(pages.numbers) * place.pool.page_tokens
    outside = (local < 0) | (local + lengths > room)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        held = room - int(local[first]) if local[first] >= 0 else 0  # a run may begin inside the table
        raise PlanError(
            f"{where}: token {int(starts[first]) + max(0, held)} is wanted, but its {len(pages.numbers)} pages of "
            f"{place.pool.page_tokens} tokens from token {pages.start} on don't hold it"
        )
    return local


def _locate(place: PoolPlace | DensePlace, pages: Pages | None, starts: Index, local: Index) -> U64:
    """Offset of each run's first token, which is at `local`, from the buffer's start."""
    if isinstance(place, DensePlace):
        at, unit = local.astype(np.uint64), np.uint64(place.tokens.unit)
        return at // unit * np.uint64(place.strides[BLOCK]) + at % unit * np.uint64(place.tokens.stride)
    assert pages is not None  # _local has refused a missing table
    number = pages.numbers[local // place.pool.page_tokens]
    bad = (number < 0) | (number >= place.pages)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        page, token = int(number[first]), int(starts[first])
        problem = (
            "that page doesn't exist (null)" if page < 0 else f"page {page} is outside the pool's {place.pages} pages"
        )
        raise PlanError(f"group {place.group.name}, worker {place.rank}, token {token}: {problem}")
    slot = place.tokens.offsets[local % place.pool.page_tokens]
    return number.astype(np.uint64) * np.uint64(place.pool.page_bytes) + slot


def expand(program: Program, segments: Segments) -> Copies:
    """All copies as flat arrays, neighbours merged. Bounds are proved for every buffer before an address is made."""
    sources, targets, lengths = [], [], []
    for piece in program.pieces:
        s, t, n = _piece_runs(program, piece, segments)
        if len(n):
            sources.append(piece.source_bases.reshape(-1, 1).plus(s).ravel())
            targets.append(piece.target_bases.reshape(-1, 1).plus(t).ravel())
            lengths.append(np.broadcast_to(n, (len(piece.source_bases), len(n))).reshape(-1))
    flat = lengths[0] if len(lengths) == 1 else np.concatenate([np.empty(0, np.uint64), *lengths])
    return Copies(join(sources), join(targets), flat)


def _piece_runs(program: Program, piece: Piece, segments: Segments) -> tuple[U64, U64, U64]:
    """Runs of one piece, as offsets from a buffer's base: (source, target, bytes)."""
    groups: list[tuple[U64, U64, U64, Index]] = []
    alike = bool((segments.tokens == segments.tokens[:1]).all())
    for tokens in (segments.tokens[:1] if alike else np.unique(segments.tokens)).tolist():
        chosen = np.flatnonzero(segments.tokens == tokens)
        folds = piece.folds if tokens == 1 else (*piece.folds, (tokens, *_token_strides(program)))
        run_bytes, outer = grow(folds)
        s, t = piece.source_starts, piece.target_starts
        for extent, source_stride, target_stride in outer:
            index = np.arange(extent, dtype=np.uint64)
            s = (s[:, None] + index * np.uint64(source_stride)).ravel()
            t = (t[:, None] + index * np.uint64(target_stride)).ravel()
        s = (s[:, None] + segments.source[chosen]).ravel()
        t = (t[:, None] + segments.target[chosen]).ravel()
        groups.append((s, t, np.full(len(s), run_bytes, np.uint64), chosen))
    if len(groups) > 1 and all(len(chosen) == len(s) for s, _, _, chosen in groups):
        order = np.argsort(np.concatenate([chosen for *_, chosen in groups]), kind="stable")
        s, t, n = (np.concatenate([group[i] for group in groups])[order] for i in range(3))
        return merge(s, t, n)
    merged = [merge(s, t, n) for s, t, n, _ in groups]
    return tuple(np.concatenate([np.empty(0, np.uint64), *(m[i] for m in merged)]) for i in range(3))  # type: ignore[return-value]


def _token_strides(program: Program) -> tuple[int, int]:
    return program.source.tokens.stride, program.target.tokens.stride


def grow(folds: Sequence[Fold]) -> tuple[int, list[Fold]]:
    """Grow the contiguous run that both sides share: (bytes of the run, the folds that are left, outermost last).

    The first fold is the element: (its bytes, 1, 1).
    """
    run = folds[0][0]
    left = sorted((fold for fold in folds[1:] if fold[0] > 1), key=lambda fold: fold[2])
    grown = True
    while grown:
        grown = False
        for fold in left:
            if fold[1] == run and fold[2] == run:
                run *= fold[0]
                left.remove(fold)
                grown = True
                break
    return run, left


def merge(s: U64, t: U64, n: U64) -> tuple[U64, U64, U64]:
    """Join neighbours that are adjacent on both sides."""
    if len(n) < 2:
        return s, t, n
    joined = (s[1:] == s[:-1] + n[:-1]) & (t[1:] == t[:-1] + n[:-1])
    if not joined.any():
        return s, t, n
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return s[first], t[first], np.add.reduceat(n, first)
