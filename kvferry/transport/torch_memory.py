"""A worker's regions as torch tensors on any one device: gather and scatter there, and landing memory there.

`TorchMemory` is to tensors what `HostMemory` is to host memory. It knows no device by name and has no kernel of its
own: runs of one length are rows of a strided view, and torch's `index_select` and `index_copy_` move them, as items of
the widest integer type that length, distances and alignment allow.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import numpy as np
import torch

from kvferry.errors import AddressError, DocumentError, TransportError
from kvferry.layout.address import U64, Address, Addresses, join
from kvferry.transport.copies import Bytes, Index
from kvferry.transport.memory import locate_runs
from kvferry.transport.runs import Runs, joined
from kvferry.transport.staging import HEADER_BYTES, KEY_BYTES, MAGIC, Slots

if TYPE_CHECKING:
    from kvferry.plan.dense import DenseCopies

Tensor: TypeAlias = Any
"""A torch.Tensor; torch has no hints here."""
Device: TypeAlias = Any
Chunk: TypeAlias = Union[Tensor, Bytes]
Fence: TypeAlias = Callable[[], None]
HOST = torch.device("cpu")
_ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ALIGN = 4096


@dataclass(frozen=True)
class TensorRegion:
    """`nbytes` bytes that the layout says are at `base`; `view` is them, uint8 [nbytes], on their device."""

    base: Address
    nbytes: int
    view: Tensor

    def __post_init__(self) -> None:
        _check_bytes(self.view, f"region {self.base}")
        if self.view.numel() != self.nbytes:
            raise AddressError(f"region {self.base}: {self.nbytes} bytes stated, the view has {self.view.numel()}")
        if not self.base.spans(self.nbytes):
            raise AddressError(f"region {self.base}: its {self.nbytes} bytes pass 2**64")


def map_tensor(tensor: Tensor) -> TensorRegion:
    """The memory of a tensor at its real address, from its first to its last item, gaps included."""
    nbytes = 0
    if tensor.numel():
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
        nbytes = (last + 1) * tensor.element_size()
    view = _bytes_of(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), nbytes)
    return TensorRegion(Address(tensor.data_ptr()), nbytes, view)


def tensor_window(base: Address, tensor: Tensor) -> TensorRegion:
    """As `map_tensor`, but the layout's addresses of these bytes start at `base`."""
    return replace(map_tensor(tensor), base=base)


class TorchMemory:
    """The memory of one worker, all on one device; the regions may overlap where they are views of the same bytes.

    `gather` and `scatter` take chunks on that device or on the host, as tensors or NumPy arrays (pinned host memory is
    fastest). They start after the work that `fence` was called for and have ended when they return. Thread-safe.
    """

    def __init__(self, regions: Sequence[TensorRegion]) -> None:
        devices = {region.view.device for region in regions}
        if len(devices) > 1:
            raise AddressError(f"the regions of a worker must be on one device, got {sorted(map(str, devices))}")
        self.device: Device = devices.pop() if devices else HOST
        merged: list[TensorRegion] = []
        for region in sorted((r for r in regions if r.nbytes), key=lambda r: r.base.value):
            last = merged[-1] if merged else None
            if last is not None and region.base.distance_from(last.base) < last.nbytes:
                merged[-1] = _union(last, region)
            else:
                merged.append(region)
        self._regions = merged
        self._order = order_on(self.device)

    def fence(self) -> Fence:
        """What this thread has put on its current stream so far comes before every gather and scatter after this.

        An engine calls it where pages become ready or free: `send(…, fence=memory.fence())`, and before `receive`. The
        result returns when that work is done. Until the first call, each gather and scatter waits for everything on
        the device: as safe, but slower.
        """
        return self._order.fence()

    def gather(self, copies: DenseCopies, out: Chunk) -> None:
        """Pages → dense chunk. AddressError, before anything is moved, where a run is outside memory or chunk."""
        chunk = self._chunk(out, writable=True)
        parts = self._parts(copies, chunk.numel())
        with self._order.ordered():
            here = chunk
            if chunk.device != self.device:
                whole = int(copies.lengths.sum(dtype=np.uint64)) == chunk.numel()
                # bytes between the runs come back as they were
                here = torch.empty_like(chunk, device=self.device) if whole else chunk.to(self.device)
            for part in parts:
                _copy_runs(here, part.dense_offsets, part.region, part.offsets, part.lengths)
            if here is not chunk:
                chunk.copy_(here, non_blocking=True)

    def scatter(self, copies: DenseCopies, chunk: Chunk) -> None:
        """Dense chunk → pages. AddressError, before anything is moved, where a run is outside memory or chunk."""
        given = self._chunk(chunk, writable=False)
        parts = self._parts(copies, given.numel())
        with self._order.ordered():
            here = given.to(self.device, non_blocking=True)
            for part in parts:
                _copy_runs(part.region, part.offsets, here, part.dense_offsets, part.lengths)

    @property
    def spans(self) -> list[Bytes]:
        """What a transport can take as host memory: on a device nothing, so everything is gathered there."""
        return [region.view.numpy() for region in self._regions] if self.device.type == HOST.type else []

    def runs(self, copies: DenseCopies) -> Runs:
        """Where a chunk's bytes really are, as `HostMemory.runs`. TransportError on a device."""
        parts = self._parts(copies, copies.total_bytes)
        if self.device.type != HOST.type:
            raise TransportError(f"bytes can't leave or land straight in pages on {self.device}; use gather='always'")
        if not parts:
            return joined(Addresses([]), np.empty(0, np.uint64))
        order = np.argsort(np.concatenate([part.dense_offsets for part in parts]), kind="stable")
        addresses = join([Addresses([Address(p.region.data_ptr())]).plus(p.offsets) for p in parts]).take(order)
        return joined(addresses, np.concatenate([part.lengths for part in parts])[order])

    def view(self, base: Address, nbytes: int) -> Tensor:
        """The bytes [base, base + nbytes) themselves. AddressError where they are not in one region."""
        lengths = np.array([nbytes], np.uint64)
        for region in self._regions:
            if region.base.value <= base.value and base.distance_from(region.base) < region.nbytes:
                offset = int(Addresses([base]).offsets_in(region.base, region.nbytes, lengths, "memory")[0])
                return region.view[offset : offset + nbytes]
        raise AddressError(f"address {base} is in no mapped region")

    def _chunk(self, chunk: Chunk, writable: bool) -> Tensor:
        if isinstance(chunk, np.ndarray):
            if chunk.dtype != np.uint8 or chunk.ndim != 1 or not chunk.flags.c_contiguous:
                raise AddressError(f"a chunk is contiguous bytes, got {chunk.dtype} values of shape {chunk.shape}")
            if writable and not chunk.flags.writeable:
                raise AddressError("the chunk to gather into is read-only")
            # torch knows no read-only memory
            return torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())
        _check_bytes(chunk, "chunk")
        if chunk.device not in (self.device, HOST):
            raise AddressError(f"a chunk must be on {self.device} or the host, got one on {chunk.device}")
        return chunk

    def _parts(self, copies: DenseCopies, chunk_bytes: int) -> list[_Part]:
        found = locate_runs([(region.base, region.nbytes) for region in self._regions], copies, chunk_bytes)
        return [_Part(self._regions[at.region].view, at.offsets, at.dense_offsets, at.lengths) for at in found]


@dataclass(frozen=True)
class _Part:
    """The runs of one region: where they are in it and in the chunk."""

    region: Tensor
    offsets: U64
    dense_offsets: U64
    lengths: U64


# moving runs; offsets are offsets in tensors from here on, already checked


def _copy_runs(target: Tensor, target_offsets: U64, source: Tensor, source_offsets: U64, lengths: U64) -> None:
    """Copy `lengths[i]` bytes from `source[source_offsets[i]:]` to `target[target_offsets[i]:]`, for every i, on one
    device. The target runs must not overlap.
    """
    to, out_of = target_offsets.astype(np.intp), source_offsets.astype(np.intp)
    for nbytes in np.unique(lengths).tolist():
        if nbytes:
            rows = np.flatnonzero(lengths == nbytes)
            _copy_equal(_Runs.of(target, to[rows], nbytes), _Runs.of(source, out_of[rows], nbytes))


def _copy_equal(target: _Runs, source: _Runs) -> None:
    item_bytes = math.gcd(target.granule, source.granule)
    to, to_index = target.rows(item_bytes)
    out_of, out_of_index = source.rows(item_bytes)
    if out_of_index is None:
        rows = out_of
    elif to_index is None:
        torch.index_select(out_of, 0, out_of_index, out=to)
        return
    else:
        rows = out_of.index_select(0, out_of_index)
    if to_index is None:
        to.copy_(rows)
    else:
        to.index_copy_(0, to_index, rows)


@dataclass(frozen=True)
class _Runs:
    """Runs of `nbytes` bytes in `span`; run i starts at `numbers[i]` · `pitch`.

    Their common pitch may be smaller than a run: the rows of the view then overlap, the runs do not.
    """

    span: Tensor  # uint8, from the first byte of a run to the last one
    nbytes: int
    pitch: int
    numbers: Index

    @staticmethod
    def of(buffer: Tensor, offsets: Index, nbytes: int) -> _Runs:
        first, last = int(offsets.min()), int(offsets.max())
        distances = offsets - first
        pitch = int(np.gcd.reduce(distances)) or nbytes
        return _Runs(buffer[first : last + nbytes], nbytes, pitch, distances // pitch)

    @property
    def granule(self) -> int:
        """Bytes of the widest item that all these runs are made of, aligned in memory and in torch's storage."""
        return math.gcd(8, self.nbytes, self.pitch, self.span.data_ptr(), self.span.storage_offset())

    def rows(self, item_bytes: int) -> tuple[Tensor, Tensor | None]:
        """(items [row, nbytes / item_bytes], the row of each run, or None where they are all of them in order)."""
        count = int(self.numbers.max()) + 1
        items = self.span.view(_ITEMS[item_bytes])
        rows = items.as_strided((count, self.nbytes // item_bytes), (self.pitch // item_bytes, 1))
        if len(self.numbers) == count and (np.diff(self.numbers) == 1).all():
            return rows, None
        return rows, torch.from_numpy(self.numbers.astype(np.int64)).to(self.span.device)


# order on the device


class Order(Protocol):
    """When copies may start, and that they have ended."""

    def fence(self) -> Fence: ...

    def ordered(self) -> AbstractContextManager[None]: ...


def order_on(device: Device) -> Order:
    """On the host each operation has ended when it returns, anywhere else there are streams; AddressError if not."""
    if device.type == HOST.type:
        return HostOrder()
    module = getattr(torch, device.type, None)
    if not hasattr(module, "Stream"):
        raise AddressError(f"memory on {device} can't be used: torch has no streams for this kind of device")
    return StreamOrder(module, device)


class HostOrder:
    def fence(self) -> Fence:
        return lambda: None

    def ordered(self) -> AbstractContextManager[None]:
        return nullcontext()


class StreamOrder:
    """Copies on a stream of their own, after the fences: an engine's later work does not delay them.

    `module` is torch's module of the device's kind, whose streams and events have the same methods for every kind.
    """

    def __init__(self, module: Any, device: Device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device=device)
        self._lock = threading.Lock()
        self._fences: list[Any] | None = None  # None: nobody has set one yet

    def fence(self) -> Fence:
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        with self._lock:
            self._fences = [other for other in self._fences or () if not other.query()] + [event]
        return event.synchronize  # type: ignore[no-any-return]  # torch has no hints

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with self._lock:
            fences = self._fences
        if fences is None:
            self._module.synchronize(self._device)
        with self._module.stream(self._stream):
            for event in fences or ():
                self._stream.wait_event(event)
            done = self._module.Event()
            try:
                yield
            finally:
                # also after an error: nothing may still be under way in memory that its owner then uses again
                done.record(self._stream)
                done.synchronize()


# landing memory on the device


class DeviceStaging:
    """`slots` landing slots of `slot_bytes` bytes on `device`: as `Staging`, for transports that can write there.

    One uint8 tensor: a header page with the key, then the slots. There is no file behind it, so no other process can
    map it, and it is given back when the last view of it is gone.
    """

    ways = ("nixl",)
    """Transports that can write there."""

    def __init__(self, slots: int, slot_bytes: int, device: Device, base: Address | None = None) -> None:
        if slots < 1 or slot_bytes < 1:
            raise DocumentError("slots", f"slots and slot_bytes must be ≥ 1, got {slots} × {slot_bytes}")
        stride = -(-slot_bytes // _ALIGN) * _ALIGN
        self.key = secrets.token_bytes(KEY_BYTES)
        self.device: Device = torch.device(device)
        self._bytes: Tensor | None = torch.zeros(HEADER_BYTES + slots * stride, dtype=torch.uint8, device=self.device)
        self.device = self._bytes.device  # with its number
        signature = torch.from_numpy(np.frombuffer(MAGIC + self.key, np.uint8).copy())
        with order_on(self.device).ordered():
            self._bytes[: len(signature)].copy_(signature)
        self.layout = Slots(base or Address(self._bytes.data_ptr()).plus(HEADER_BYTES), slots, slot_bytes, stride)
        self.layout.check()
        self.slots, self.slot_bytes = slots, slot_bytes

    @property
    def memory(self) -> Tensor:
        """Header page and slots."""
        if self._bytes is None:
            raise TransportError("the staging memory is closed")
        return self._bytes

    def view(self, slot: int) -> Tensor:
        """The bytes of a slot."""
        self.layout.address(slot)
        start = HEADER_BYTES + slot * self.layout.stride_bytes
        return self.memory[start : start + self.layout.slot_bytes]

    def address(self, slot: int) -> Address:
        """What peers call the first byte of a slot."""
        return self.layout.address(slot)

    def buffer(self, nbytes: int) -> Tensor:
        """Memory on the same device for a chunk that leaves from here."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """Give the memory back; may be called again."""
        self._bytes = None


def _check_bytes(tensor: Tensor, what: str) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise AddressError(
            f"{what}: must be contiguous bytes, got {tensor.dtype} values of shape {tuple(tensor.shape)}"
        )


def _bytes_of(storage: Any, offset: int, nbytes: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (nbytes,), (1,))


def _union(low: TensorRegion, high: TensorRegion) -> TensorRegion:
    """One region for two that overlap, if they are views of one storage, as far apart there as in the layout."""
    shift = high.base.distance_from(low.base)
    storage, start = low.view.untyped_storage(), low.view.storage_offset()
    same = storage.data_ptr() == high.view.untyped_storage().data_ptr()
    if not same or high.view.storage_offset() - start != shift:
        raise AddressError(
            f"regions {low.base} + {low.nbytes} and {high.base} + {high.nbytes} overlap but are different memory"
        )
    nbytes = max(low.nbytes, shift + high.nbytes)
    return TensorRegion(low.base, nbytes, _bytes_of(storage, start, nbytes))
