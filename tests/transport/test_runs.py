"""Runs against a plain list of byte addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import AddressError, TransportError
from kvferry.layout.address import Address, Addresses
from kvferry.transport.runs import Runs, cut_to_each_other, decode_runs, joined, one_run

TOP = 1 << 64
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def runs_of(sizes: list[int], gaps: list[int], base: int) -> Runs:
    """Runs from `base` upward, `gaps[i]` bytes before run i; 0 makes it a neighbour."""
    addresses, at = [], base
    for size, gap in zip(sizes, gaps):
        addresses.append(Address(at + gap))
        at += gap + size
    return joined(Addresses(addresses), np.array(sizes, np.uint64))


def bytes_of(addresses: Addresses, sizes: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[int]:
    return [a + i for a, n in zip(addresses.u64.tolist(), sizes.tolist()) for i in range(n)]


@given(lengths, lengths, st.data())
def test_cut_to_each_other_pairs_each_byte_with_itself(ours: list[int], theirs: list[int], data: st.DataObject) -> None:
    theirs.append(sum(ours))
    if sum(theirs) > sum(ours):  # make both sides as long
        ours = [*ours, sum(theirs) - sum(ours)]
    gaps = st.lists(st.integers(0, 3), min_size=len(ours) + len(theirs), max_size=len(ours) + len(theirs))
    drawn = data.draw(gaps)
    source = runs_of(ours, drawn, 0xFFFF81AB54E01000)
    target = runs_of(theirs, drawn[len(ours) :], TOP - 1 - sum(theirs) - sum(drawn))
    s, t, n = cut_to_each_other(source, target)
    assert bytes_of(s, n) == bytes_of(source.addresses, source.lengths)
    assert bytes_of(t, n) == bytes_of(target.addresses, target.lengths)
    merged = (np.diff(s.u64) == n[:-1]) & (np.diff(t.u64) == n[:-1])
    assert not merged.any(), "neighbours on both sides are one run"
    assert decode_runs(target.encode(), target.nbytes).encode() == target.encode()


@pytest.mark.parametrize(
    ("rows", "nbytes", "problem"),
    [
        ([(16, 8)], 9, "the runs have 8 bytes together, 9 were granted"),
        ([(16, 8), (32, 0)], 8, "a run of 0"),
        ([(16, TOP - 1), (32, 9)], 8, "a run of 0 or of more than the 8 bytes"),  # their sum wraps to 8
        ([(16, 9)], 8, "of more than the 8 bytes"),
        ([], 8, "the runs have 0 bytes together"),
    ],
)
def test_lists_of_a_peer_that_do_not_fit_are_refused(rows: list[tuple[int, int]], nbytes: int, problem: str) -> None:
    data = np.array(rows, "<u8").reshape(-1, 2).tobytes()
    with pytest.raises(TransportError, match=problem):
        decode_runs(data, nbytes)


def test_runs_end_at_the_end_of_the_address_space_and_not_behind_it() -> None:
    data = np.array([(TOP - 8, 8)], "<u8").tobytes()
    assert decode_runs(data, 8).nbytes == 8
    with pytest.raises(AddressError):
        decode_runs(np.array([(TOP - 7, 8)], "<u8").tobytes(), 8)
    with pytest.raises(TransportError, match="16 bytes each"):
        decode_runs(b"12345678", 8)


def test_different_sizes_are_refused() -> None:
    with pytest.raises(TransportError, match="8 bytes here, 9 bytes there"):
        cut_to_each_other(one_run(Address(0), 8), one_run(Address(0), 9))


def test_nothing_is_nothing() -> None:
    nothing = joined(Addresses([]), np.empty(0, np.uint64))
    assert [len(part) for part in cut_to_each_other(nothing, decode_runs(b"", 0))] == [0, 0, 0]
