"""Where a worker's regions really are in this process, and the two copies that touch them: gather and scatter.

A region has a base address (what its layout says) and a view (host memory). They need not agree: a *window* puts host
memory at any base, which is how an accelerator's address space (bit 63 set) is emulated in tests. Only offsets from
the base ever index the view.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import AddressError
from kvferry.layout.address import U64, Address, Addresses

Bytes = npt.NDArray[np.uint8]

LONG_RUN_BYTES = 32 << 10
"""From this length on one slice assignment per run costs nothing beside the copy itself."""


class Runs(Protocol):
    """What gather and scatter need of `kvferry.plan.dense.DenseCopies`."""

    @property
    def addresses(self) -> Addresses: ...
    @property
    def dense_offsets(self) -> U64: ...
    @property
    def lengths(self) -> U64: ...
    @property
    def total_bytes(self) -> int: ...


@dataclass(frozen=True)
class MappedRegion:
    """`nbytes` bytes that the layout calls `base` and that lie in `view` (a flat uint8 array) in this process."""

    base: Address
    nbytes: int
    view: Bytes

    def __post_init__(self) -> None:
        if self.view.dtype != np.uint8 or self.view.ndim != 1 or self.view.nbytes < self.nbytes:
            raise AddressError(f"region {self.base}: expected a flat uint8 view of at least {self.nbytes} bytes")
        if not self.base.spans(self.nbytes):
            raise AddressError(f"region {self.base} + {self.nbytes} bytes passes 2**64")


def window(base: Address, array: Any) -> MappedRegion:
    """Put the host memory of `array` at address `base`: the emulated device address space of the tests."""
    view = _bytes_of(array)
    return MappedRegion(base, view.nbytes, view)


def map_array(array: Any) -> MappedRegion:
    """Map an array where it is: NumPy, torch on the CPU, or anything with `__dlpack__` or `data_ptr()`; it must be
    contiguous.
    """
    view = _bytes_of(array)
    return MappedRegion(Address(view.__array_interface__["data"][0]), view.nbytes, view)


def map_pointer(base: int, nbytes: int, keep_alive: object = None) -> MappedRegion:
    """Map `nbytes` bytes of this process's own memory at pointer `base`, as engines hand them out. The caller owns the
    memory.
    """
    # a raw pointer is all that some engines give; it is our own process's, never a peer's
    buffer = (ctypes.c_uint8 * nbytes).from_address(base)
    buffer._kvferry_keep_alive = keep_alive  # type: ignore[attr-defined]
    return MappedRegion(Address(base), nbytes, np.frombuffer(memoryview(buffer), np.uint8))


def _bytes_of(array: Any) -> Bytes:
    if hasattr(
        array, "data_ptr"
    ):  # torch and its kin: dtypes that NumPy lacks make from_dlpack fail, the pointer never does
        if not array.is_contiguous() or array.device.type != "cpu":
            raise AddressError(
                f"expected a contiguous CPU tensor, got {array.device} with strides {tuple(array.stride())}"
            )
        nbytes = array.numel() * array.element_size()
        return map_pointer(array.data_ptr(), nbytes, array).view
    dense = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
    if not dense.flags.c_contiguous or not dense.flags.writeable:
        raise AddressError("expected a writeable C-contiguous array")
    return dense.reshape(-1).view(np.uint8)


class HostMemory:
    """A worker's regions in host memory, in any order; AddressError where two of them overlap (give one region then)."""

    def __init__(self, regions: Sequence[MappedRegion]) -> None:
        self.regions = tuple(sorted(regions, key=lambda region: region.base.value))
        for below, above in itertools.pairwise(self.regions):
            if below.base.value + below.nbytes > above.base.value:
                raise AddressError(
                    f"regions {below.base} + {below.nbytes} bytes and {above.base} overlap: map them as one"
                )
        self._starts = np.array([region.base.value for region in self.regions], dtype=np.uint64)

    def gather(self, copies: Runs, out: Bytes) -> None:
        """Copy the runs from the pages into the chunk `out` (uint8, at least `total_bytes`)."""
        for view, offsets, chosen in self._by_region(copies, out):
            _copy(out, copies.dense_offsets[chosen], view, offsets, copies.lengths[chosen])

    def scatter(self, copies: Runs, chunk: Bytes) -> None:
        """Copy the runs from the chunk into the pages."""
        for view, offsets, chosen in self._by_region(copies, chunk):
            _copy(view, offsets, chunk, copies.dense_offsets[chosen], copies.lengths[chosen])

    def _by_region(self, copies: Runs, chunk: Bytes) -> list[tuple[Bytes, U64, slice | npt.NDArray[np.intp]]]:
        """Runs by region, all checked before any is copied: a bad plan must not half-happen."""
        count = len(copies.lengths)
        if not count:
            return []
        dense = Addresses(copies.dense_offsets)
        dense.offsets_in(Address(0), chunk.nbytes, copies.lengths, "chunk")
        index = np.searchsorted(self._starts, copies.addresses.u64, side="right") - 1
        if (index < 0).any():
            first = copies.addresses.take(np.flatnonzero(index < 0)[:1])
            raise AddressError(f"address {first.hex()[0]} is in none of this worker's regions")
        found = []
        for number in np.unique(index).tolist():
            region = self.regions[number]
            chosen: slice | npt.NDArray[np.intp] = np.flatnonzero(index == number)
            if len(chosen) == count:  # type: ignore[arg-type]
                chosen = slice(None)
            part = copies.addresses.take(chosen)
            offsets = part.offsets_in(region.base, region.nbytes, copies.lengths[chosen], f"region {region.base}")
            found.append((region.view, offsets, chosen))
        return found


def _copy(target: Bytes, target_offsets: U64, source: Bytes, source_offsets: U64, lengths: U64) -> None:
    """Copy runs between two flat byte views; offsets and lengths were checked by the caller."""
    first = int(lengths[0])
    if (lengths == first).all():
        _copy_equal(target, target_offsets, source, source_offsets, first)
        return
    for length in np.unique(lengths).tolist():
        chosen = lengths == length
        _copy_equal(target, target_offsets[chosen], source, source_offsets[chosen], length)


def _copy_equal(target: Bytes, target_offsets: U64, source: Bytes, source_offsets: U64, run_bytes: int) -> None:
    """Copy runs of one length: long ones by slices, short ones as items of `run_bytes` bytes by NumPy's indexing,
    which releases the GIL.
    """
    if not run_bytes:
        return
    if run_bytes >= LONG_RUN_BYTES or len(source_offsets) == 1:
        for to, at in zip(target_offsets.tolist(), source_offsets.tolist(), strict=True):
            target[to : to + run_bytes] = source[at : at + run_bytes]
        return
    rows, index = _items(source, source_offsets, run_bytes)
    start = int(target_offsets[0])
    steps = np.arange(len(target_offsets), dtype=np.uint64) * np.uint64(run_bytes)
    if rows.flags.c_contiguous and (target_offsets - target_offsets[0] == steps).all():
        out = target[start : start + run_bytes * len(index)].view(f"V{run_bytes}")
        np.take(rows, index, out=out, mode="clip")  # clip skips take's own buffering; the index is checked
        return
    values = np.take(rows, index, mode="clip") if rows.flags.c_contiguous else rows[index]
    places, to_index = _items(target, target_offsets, run_bytes)
    places[to_index] = values


def _items(view: Bytes, offsets: U64, run_bytes: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.intp]]:
    """The view as items of `run_bytes` bytes, and the index of each offset.

    Aligned offsets index disjoint items; others index items that begin at every byte and overlap.
    """
    phase = int(offsets[0]) % run_bytes
    item = np.dtype(f"V{run_bytes}")
    if not ((offsets - np.uint64(phase)) % np.uint64(run_bytes)).any():
        count = (view.nbytes - phase) // run_bytes
        rows: npt.NDArray[np.void] = view[phase : phase + count * run_bytes].view(item)
        return rows, (offsets // np.uint64(run_bytes)).astype(np.intp)
    sliding: npt.NDArray[np.void] = np.ndarray((view.nbytes - run_bytes + 1,), item, view.data, 0, (1,))
    return sliding, offsets.astype(np.intp)
