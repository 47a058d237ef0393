"""Where a worker's regions really are in this process, and moving runs between them and dense chunks.

A region's address is what the layout says. It may differ from where the bytes are (an address window): so device
addresses that use all 64 bits are emulated with plain host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import AddressError
from kvferry.layout.address import U64, Address, Addresses, join
from kvferry.transport.copies import Bytes, copy_runs
from kvferry.transport.runs import Runs, joined

if TYPE_CHECKING:
    from kvferry.plan.dense import DenseCopies


@dataclass(frozen=True)
class MappedRegion:
    """`nbytes` bytes that the layout says are at `base` and that this process reaches through `view`."""

    base: Address
    nbytes: int
    view: Bytes

    def __post_init__(self) -> None:
        if self.view.dtype != np.uint8 or self.view.ndim != 1 or not self.view.flags.c_contiguous:
            raise AddressError(f"region {self.base}: the view must be contiguous bytes, got {self.view.dtype} values")
        if self.view.nbytes != self.nbytes:
            raise AddressError(f"region {self.base}: {self.nbytes} bytes stated, the view has {self.view.nbytes}")
        if not self.base.spans(self.nbytes):
            raise AddressError(f"region {self.base}: its {self.nbytes} bytes pass 2**64")


@dataclass(frozen=True)
class _Part:
    """The runs of one region: which ones, and where they are in it and in the chunk."""

    region: MappedRegion
    offsets: U64
    dense_offsets: U64
    lengths: U64


class HostMemory:
    """The memory of one worker. Regions may overlap where they are views of the same bytes; AddressError elsewhere."""

    def __init__(self, regions: Sequence[MappedRegion]) -> None:
        merged: list[MappedRegion] = []
        for region in sorted((r for r in regions if r.nbytes), key=lambda r: r.base.value):
            last = merged[-1] if merged else None
            if last is not None and region.base.distance_from(last.base) < last.nbytes:
                merged[-1] = _union(last, region)
            else:
                merged.append(region)
        self._regions = merged

    def gather(self, copies: DenseCopies, out: Bytes) -> None:
        """Pages → dense chunk. AddressError, before anything is moved, where a run is outside memory or chunk."""
        _check_chunk(out, writable=True)
        for part in self._parts(copies, out.nbytes):
            copy_runs(out, part.dense_offsets, part.region.view, part.offsets, part.lengths)

    def scatter(self, copies: DenseCopies, chunk: Bytes) -> None:
        """Dense chunk → pages. AddressError, before anything is moved, where a run is outside memory or chunk."""
        _check_chunk(chunk, writable=False)
        parts = self._parts(copies, chunk.nbytes)
        for part in parts:
            if not part.region.view.flags.writeable:
                raise AddressError(f"region {part.region.base} is read-only")
        for part in parts:
            copy_runs(part.region.view, part.offsets, chunk, part.dense_offsets, part.lengths)

    @property
    def spans(self) -> list[Bytes]:
        """All mapped bytes, where they really are."""
        return [region.view for region in self._regions]

    def runs(self, copies: DenseCopies) -> Runs:
        """Where a chunk's bytes really are in this process. AddressError where a run is outside."""
        parts = self._parts(copies, copies.total_bytes)
        if not parts:
            return joined(Addresses([]), np.empty(0, np.uint64))
        order = np.argsort(np.concatenate([part.dense_offsets for part in parts]), kind="stable")
        addresses = join([Addresses([host_address(p.region.view)]).plus(p.offsets) for p in parts]).take(order)
        return joined(addresses, np.concatenate([part.lengths for part in parts])[order])

    def view(self, base: Address, nbytes: int) -> Bytes:
        """The bytes [base, base + nbytes) themselves. AddressError where they are not in one mapped region."""
        lengths = np.array([nbytes], np.uint64)
        for region in self._regions:
            if region.base.value <= base.value and base.distance_from(region.base) < region.nbytes:
                offset = int(Addresses([base]).offsets_in(region.base, region.nbytes, lengths, "memory")[0])
                return region.view[offset : offset + nbytes]
        raise AddressError(f"address {base} is in no mapped region")

    def _parts(self, copies: DenseCopies, chunk_bytes: int) -> list[_Part]:
        found = locate_runs([(region.base, region.nbytes) for region in self._regions], copies, chunk_bytes)
        return [_Part(self._regions[at.region], at.offsets, at.dense_offsets, at.lengths) for at in found]


@dataclass(frozen=True)
class Located:
    """The runs that lie in one of several regions: where they are in it and in the chunk."""

    region: int
    offsets: U64
    dense_offsets: U64
    lengths: U64


def locate_runs(regions: Sequence[tuple[Address, int]], copies: DenseCopies, chunk_bytes: int) -> list[Located]:
    """`regions`: (base, bytes) in rising order, none overlapping. AddressError where a run is outside all of them, or
    outside the chunk.
    """
    addresses, lengths = copies.addresses, copies.lengths
    if not len(lengths) == len(addresses) == len(copies.dense_offsets):
        raise AddressError(f"{len(addresses)} addresses, {len(copies.dense_offsets)} offsets, {len(lengths)} lengths")
    dense = Addresses(copies.dense_offsets).offsets_in(Address(0), chunk_bytes, lengths, "chunk")
    if not len(lengths):
        return []
    if not regions:
        raise AddressError(f"no memory is mapped, {len(lengths)} runs were to be moved")
    bases = Addresses([base for base, _ in regions])
    # an address below every region counts to the first one, which then refuses it
    owner = np.maximum(np.searchsorted(bases.u64, addresses.u64, side="right"), 1) - 1
    found = []
    for index, rows in _grouped(owner):
        inside = addresses.take(rows).offsets_in(*regions[index], lengths[rows], "memory")
        found.append(Located(index, inside, dense[rows], lengths[rows]))
    return found


def _grouped(values: npt.NDArray[np.intp]) -> list[tuple[int, npt.NDArray[np.intp] | slice]]:
    """(value, rows that have it), without copies where the rows come in order, as plans make them."""
    ordered = bool((values[1:] >= values[:-1]).all())
    order = None if ordered else np.argsort(values, kind="stable")
    ascending = values if order is None else values[order]
    edges = [0, *(np.flatnonzero(ascending[1:] != ascending[:-1]) + 1).tolist(), len(values)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    return [(int(ascending[span.start]), span if order is None else order[span]) for span in spans]


def _check_chunk(chunk: Bytes, writable: bool) -> None:
    if chunk.dtype != np.uint8 or chunk.ndim != 1 or not chunk.flags.c_contiguous:
        raise AddressError(f"a chunk is contiguous bytes, got {chunk.dtype} values of shape {chunk.shape}")
    if writable and not chunk.flags.writeable:
        raise AddressError("the chunk to gather into is read-only")


def _union(low: MappedRegion, high: MappedRegion) -> MappedRegion:
    """One region for two that overlap, if both say the same about where their bytes are."""
    shift = high.base.distance_from(low.base)
    low_host, high_host = host_address(low.view), host_address(high.view)
    if high_host.value < low_host.value or high_host.distance_from(low_host) != shift:
        raise AddressError(
            f"regions {low.base} + {low.nbytes} and {high.base} + {high.nbytes} overlap but are different memory"
        )
    if shift + high.nbytes <= low.nbytes:
        return low
    nbytes = shift + high.nbytes
    writable = low.view.flags.writeable and high.view.flags.writeable
    return MappedRegion(low.base, nbytes, _bytes_at(low_host, nbytes, writable, (low.view, high.view)))


def map_array(array: Any) -> MappedRegion:
    """The memory of an array at its real address: NumPy, torch on the CPU, or any CPU object with `__dlpack__`.

    An array with gaps maps all bytes from its first to its last item. AddressError where that can't be known.
    """
    if hasattr(array, "data_ptr"):
        device = str(getattr(array, "device", "cpu"))
        if device.partition(":")[0] != "cpu":
            raise AddressError(f"memory on device {device!r} can't be mapped here, only CPU memory")
        item = int(array.element_size())
        strides = [int(stride) * item for stride in array.stride()]
        return _map(int(array.data_ptr()), list(array.shape), strides, item, True, array)
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise AddressError(f"can't map a {type(array).__name__}: it has neither data_ptr nor __dlpack__")
        array = np.from_dlpack(array)
    pointer = host_address(array).value
    return _map(pointer, list(array.shape), list(array.strides), array.itemsize, array.flags.writeable, array)


def window(base: Address, array: Any) -> MappedRegion:
    """As `map_array`, but the layout's addresses of these bytes start at `base`: an emulated device."""
    return replace(map_array(array), base=base)


def host_address(array: npt.NDArray[Any]) -> Address:
    """Where the first item of `array` is in this process."""
    return Address(array.__array_interface__["data"][0])


def _map(
    pointer: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, writable: bool, owner: object
) -> MappedRegion:
    if any(stride < 0 for stride in strides):
        raise AddressError("an array with negative strides can't be mapped; map the array it is a view of")
    nbytes = 0 if 0 in shape else item_bytes + sum((n - 1) * stride for n, stride in zip(shape, strides))
    base = Address(pointer)
    view = _bytes_at(base, nbytes, writable, owner) if nbytes else np.empty(0, np.uint8)
    return MappedRegion(base, nbytes, view)


class _Interface:
    """Memory as NumPy's array interface describes it; keeps its owner alive as long as any array made of it."""

    def __init__(self, interface: dict[str, object], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def _bytes_at(address: Address, nbytes: int, writable: bool, owner: object) -> Bytes:
    interface = {"data": (address.value, not writable), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(_Interface(interface, owner))
