"""Gather and scatter against a copy that is one line of Python per byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import AddressError
from kvferry.layout.address import U64, Address, Addresses
from kvferry.transport.memory import HostMemory, map_array, window

BASES = (0xFFFF81AB54E01000, (1 << 63) - 100, (1 << 64) - 700, 16)


@dataclass(frozen=True)
class Runs:
    addresses: Addresses
    dense_offsets: U64
    lengths: U64

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum())


def runs(places: list[tuple[int, int, int]]) -> Runs:
    columns = [np.array(column, dtype=np.uint64) for column in zip(*places, strict=True)] if places else [U0] * 3
    return Runs(Addresses(columns[0]), columns[1], columns[2])


U0 = np.empty(0, np.uint64)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_gather_and_scatter_equal_a_plain_copy(data: st.DataObject) -> None:
    """Mixed and equal lengths, aligned or not, over one or two windows: as the plain copy, and nothing else touched."""
    draw = data.draw
    low, high = 300, 700
    bases = draw(st.permutations(BASES))[:2]
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 16]), max_size=12))
    if draw(st.booleans()):
        lengths = [draw(st.sampled_from([1, 4, 7, 16]))] * len(lengths)
    aligned = draw(st.booleans())
    places, used, dense = [], [0, 0], draw(st.integers(0, 5))
    for length in lengths:
        side = draw(st.integers(0, 1))
        at = used[side] + (0 if aligned else draw(st.integers(0, 3)))
        places.append((bases[side] + at, dense, length))
        used[side] = at + length
        dense += length + (0 if aligned else draw(st.integers(0, 2)))
    order = draw(st.permutations(places))
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in (high, high)]
    memory = HostMemory([window(Address(base), array) for base, array in zip(bases, arrays, strict=True)])
    chunk = rng.integers(0, 256, low, dtype=np.uint8)

    expected = chunk.copy()
    for address, offset, length in order:
        side = 0 if 0 <= address - bases[0] < high else 1
        for i in range(length):
            expected[offset + i] = arrays[side][address - bases[side] + i]
    memory.gather(runs(order), chunk)
    assert (chunk == expected).all()

    fresh = rng.integers(0, 256, low, dtype=np.uint8)
    wanted = [array.copy() for array in arrays]
    for address, offset, length in order:
        side = 0 if 0 <= address - bases[0] < high else 1
        for i in range(length):
            wanted[side][address - bases[side] + i] = fresh[offset + i]
    memory.scatter(runs(order), fresh)
    assert all((array == want).all() for array, want in zip(arrays, wanted, strict=True))


@pytest.mark.parametrize(
    "bad",
    [
        [(BASES[0] - 1, 0, 4)],
        [(BASES[0] + 60, 0, 5)],
        [(BASES[0], 61, 4)],
        [(BASES[0], 0, 1 << 63)],
        [(BASES[0], (1 << 64) - 2, 4)],
        [(0, 0, 4)],
    ],
)
def test_f5_out_of_bounds_is_refused_before_anything_is_copied(bad: list[tuple[int, int, int]]) -> None:
    array, chunk = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    memory = HostMemory([window(Address(BASES[0]), array)])
    for action in (memory.gather, memory.scatter):
        with pytest.raises(AddressError):
            action(runs([(BASES[0], 0, 8), *bad]), chunk)
    assert not array.any() and chunk.all()


def test_long_runs_and_many_runs() -> None:
    source = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    memory = HostMemory([map_array(source)])
    start = source.__array_interface__["data"][0]
    for run_bytes in (512, 32 << 10, 100_000):
        count = (1 << 20) // run_bytes
        order = np.random.default_rng(2).permutation(count)
        places = [(start + int(i) * run_bytes, n * run_bytes, run_bytes) for n, i in enumerate(order)]
        chunk = np.zeros(1 << 20, np.uint8)
        memory.gather(runs(places), chunk)
        expected = b"".join(source[i * run_bytes : (i + 1) * run_bytes].tobytes() for i in order)
        assert chunk[: len(expected)].tobytes() == expected


def test_overlapping_regions_must_be_the_same_memory() -> None:
    array = np.arange(64, dtype=np.uint8)
    with pytest.raises(AddressError, match="overlap but are different memory"):
        HostMemory([window(Address(0), array), window(Address(63), array)])
    # K and V interleaved: each view maps from its first to its last byte, over the other one's bytes
    both = array.reshape(8, 2, 4)
    memory = HostMemory([map_array(both[:, 1]), map_array(both[:, 0]), map_array(array[8:12])])
    chunk = np.zeros(64, np.uint8)
    memory.gather(runs([(array.__array_interface__["data"][0], 0, 64)]), chunk)
    assert (chunk == array).all()


def test_gather_reads_where_scatter_may_not_write() -> None:
    array = np.arange(8, dtype=np.uint8)
    array.flags.writeable = False
    memory, place = HostMemory([window(Address(0), array)]), runs([(2, 0, 4)])
    chunk = np.zeros(4, np.uint8)
    memory.gather(place, chunk)
    assert chunk.tolist() == [2, 3, 4, 5]
    with pytest.raises(AddressError, match="read-only"):
        memory.scatter(place, chunk)


def test_mapped_memory_lives_as_long_as_its_region() -> None:
    region = map_array(np.full(1 << 20, 7, np.uint8))
    np.zeros(1 << 20, np.uint8)  # would take the place of freed memory
    assert (region.view == 7).all()


def test_map_array_takes_numpy_and_torch() -> None:
    array = np.arange(24, dtype=np.int16).reshape(2, 12)
    region = map_array(array)
    assert region.nbytes == 48 and region.base.value == array.ctypes.data
    assert map_array(array[:, ::2]).nbytes == 46  # up to the last item
    assert map_array(array[:0]).nbytes == 0
    with pytest.raises(AddressError, match="negative strides"):
        map_array(array[::-1])
    with pytest.raises(AddressError, match="neither data_ptr nor __dlpack__"):
        map_array([1, 2])
    torch = pytest.importorskip("torch", reason="torch is not installed: its tensors can't be tried")
    tensor = torch.zeros(8, dtype=torch.bfloat16)
    region = map_array(tensor)
    assert region.nbytes == 16 and region.base.value == tensor.data_ptr()
    region.view[:] = 0xFF
    assert torch.isnan(tensor).all()
    with pytest.raises(AddressError, match="device 'meta'"):
        map_array(torch.zeros(4, device="meta"))
