"""Proof: what must hold before a byte moves, shown on the symbolic program and on the bound copies.

Bounds are exact integers against the room that is left; cells are compared with each axis's enumerated offsets, not
with the folds that compile made of them; completeness is a count against what the layout says the target owns.
"""

from __future__ import annotations

import numpy as np

from kvferry.errors import ProofError
from kvferry.layout.address import U64, Addresses
from kvferry.plan.bind import Segments
from kvferry.plan.program import Place, PoolPlace, Program


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
    if len(lengths) < 2:
        return
    order = np.argsort(target.u64, kind="stable")
    start = target.u64[order]
    gap = start[1:] - start[:-1]  # sorted, so never wraps
    clash = np.flatnonzero(gap < lengths[order][:-1])
    if len(clash):
        at = target.take(order[clash[:1]]).hex()[0]
        raise ProofError(f"{what}: two wanted ranges share target bytes at {at} (does a page serve twice?)")


def prove_cells(program: Program) -> None:
    """The program pairs each wanted cell of the box with itself, once: along every axis, and over the (layer, part)
    buffers.

    An offset is a sum of one term per axis, so it is enough that the pieces' corner offsets and folds, expanded, are
    exactly the sums that the layout's definition gives. Checked on the multiset of (source, target) offset pairs, for
    one token.
    """
    got = []
    for piece in program.pieces:
        s, t = piece.source_starts, piece.target_starts
        for extent, source_stride, target_stride in piece.folds[1:]:
            index = np.arange(extent, dtype=np.uint64)
            s = (s[:, None] + index * np.uint64(source_stride)).ravel()
            t = (t[:, None] + index * np.uint64(target_stride)).ravel()
        got.append(
            (
                piece.source_bases.reshape(-1, 1).plus(s).ravel().u64,
                piece.target_bases.reshape(-1, 1).plus(t).ravel().u64,
            )
        )
    want = [_cell_addresses(place) for place in (program.source, program.target)]
    have = [np.concatenate([np.empty(0, np.uint64), *(pair[i] for pair in got)]) for i in range(2)]
    orders = [np.lexsort((b, a)) for a, b in (want, have)]
    if len(want[0]) != len(have[0]) or any(
        (w[orders[0]] != h[orders[1]]).any() for w, h in zip(want, have, strict=True)
    ):
        raise ProofError(
            f"group {program.source.group.name}, layers {list(program.source.box.layers)}: "
            "the program doesn't pair each cell with itself once"
        )


def _cell_addresses(place: Place) -> U64:
    """Addresses of every element of one token of the box, slot offset left out, in logical order: from the layout's
    definition.
    """
    offsets = np.zeros(1, np.uint64)
    for axis in place.box.axes:
        offsets = (offsets[:, None] + place.axis_offsets(axis)).ravel()
    return place.bases.reshape(-1, 1).plus(offsets).ravel().u64
