"""Proof: what must hold before a byte moves, shown on the symbolic program and on the bound copies.

Bounds are exact integers against the room that is left; cells are compared with each axis's enumerated offsets, not
with the folds that compile made of them; completeness is a count against what the layout says the target owns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvferry.errors import ProofError
from kvferry.layout.address import U64, Addresses
from kvferry.layout.document import Struct
from kvferry.plan.bind import Segments
from kvferry.plan.program import AxisPart, Fold, Piece, PoolPlace, Program


class Proof(Struct, frozen=True, omit_defaults=False):
    """What was shown before a byte moved. It exists only where all of it holds: what fails is an error, not a False."""

    bytes: int
    copies: int
    in_bounds: bool = True
    exactly_once: bool = True
    complete: bool = True


def prove_bounds(program: Program, segments: Segments) -> None:
    """Every byte that the bound program touches lies inside its region: largest offset plus run against the room that
    is left (exact integers).
    """
    if not len(segments.tokens):
        return
    for side, place in enumerate((program.source, program.target)):
        if not isinstance(place, PoolPlace):
            continue
        starts = segments.target if side else segments.source
        ends = starts + (segments.tokens - 1).astype(np.uint64) * np.uint64(place.tokens.stride)
        reach = int(ends.max()) + _cell_reach(place)
        if reach > min(place.rooms):
            buffer = int(np.argmin(place.rooms))
            raise ProofError(
                f"group {place.group.name}, worker {place.rank}, buffer {buffer} of the box: a copy reaches "
                f"byte {reach}, its region ends after {min(place.rooms)}"
            )


def _cell_reach(place: PoolPlace) -> int:
    """Bytes from a token's slot to the end of its last element."""
    return place.group.item_bytes + sum(int(place.axis_offsets(axis).max(initial=0)) for axis in place.box.axes)


def prove_disjoint(target: Addresses, lengths: U64, what: str) -> None:
    """No byte is written twice: sorted by address, no range begins before its predecessor has ended. Never adds to an
    address.
    """
    clash = target.first_overlap(lengths)
    if clash is not None:
        at = target.take(np.array([clash])).first()
        raise ProofError(f"{what}: two wanted ranges share target bytes at {at} (does a page serve twice?)")


def prove_cells(program: Program) -> None:
    """The program pairs each wanted cell of the box with itself, once.

    An offset is a sum of one term per axis, so it is enough to show that each axis alone pairs every index with itself,
    that the pieces are the product of the axes' parts, and that each member of that product comes with every (layer,
    part) buffer. Nothing is enumerated but one axis at a time.
    """
    source, target = program.source, program.target
    for axis, parts in zip(source.box.axes, program.axes, strict=True):
        got = _pairs([_expand(part.source, part.target, part.folds) for part in parts])
        _compare(program, got, (source.axis_offsets(axis), target.axis_offsets(axis)), f"{axis} ")
    members = list(itertools.product(*program.axes))
    share, rest = divmod(len(program.pieces), max(1, len(members)))
    if rest or (members and not share):
        raise _not_once(program, "")
    for index, member in enumerate(members):
        pieces = program.pieces[index * share : (index + 1) * share]
        buffers = [_buffers_of(program, piece, member) for piece in pieces]
        _compare(program, _pairs(buffers), (source.bases.u64, target.bases.u64), "")


def _buffers_of(program: Program, piece: Piece, member: Sequence[AxisPart]) -> tuple[U64, U64]:
    """The piece's buffers (source, target), after showing that it covers `member`, one part of each axis, no more."""
    s, t = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    folds: list[Fold] = [(program.source.group.item_bytes, 1, 1)]
    for part in member:
        s, t = np.add.outer(s, part.source).ravel(), np.add.outer(t, part.target).ravel()
        folds += part.folds
    same = np.array_equal(s, piece.source_starts) and np.array_equal(t, piece.target_starts)
    if not same or piece.folds[: len(folds)] != tuple(folds):
        raise _not_once(program, "")
    rest = piece.folds[len(folds) :]
    zero = np.zeros(1, np.uint64)
    offsets = _expand(zero, zero, rest)
    one, other = (
        bases.reshape(-1, 1).plus(some).ravel().u64
        for bases, some in zip((piece.source_bases, piece.target_bases), offsets, strict=True)
    )
    return one, other


def _expand(s: U64, t: U64, folds: Sequence[Fold]) -> tuple[U64, U64]:
    for extent, source_stride, target_stride in folds:
        index = np.arange(extent, dtype=np.uint64)
        s = np.add.outer(s, index * np.uint64(source_stride)).ravel()
        t = np.add.outer(t, index * np.uint64(target_stride)).ravel()
    return s, t


def _pairs(some: Sequence[tuple[U64, U64]]) -> tuple[U64, U64]:
    empty = np.empty(0, np.uint64)
    return np.concatenate([empty, *(s for s, _ in some)]), np.concatenate([empty, *(t for _, t in some)])


def _compare(program: Program, got: tuple[U64, U64], want: tuple[U64, U64], what: str) -> None:
    """Both are the same multiset of (source, target) pairs."""
    if len(got[0]) != len(want[0]):
        raise _not_once(program, what)
    orders = [np.lexsort((t, s)) for s, t in (got, want)]
    for ours, theirs in zip(got, want, strict=True):
        if (ours[orders[0]] != theirs[orders[1]]).any():
            raise _not_once(program, what)


def _not_once(program: Program, what: str) -> ProofError:
    place = program.source
    return ProofError(
        f"group {place.group.name}, layers {list(place.box.layers)}: {what}"
        "the program doesn't pair each cell with itself once"
    )
