"""Layouts read from live tensors: PyTorch, NumPy, or anything with `data_ptr()` or `__dlpack__`.

Nothing is imported for it: a tensor is whatever has a shape, strides, an item type and an address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import numpy as np

from kvferry.errors import AddressError, DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import DTYPE_BYTES, TOKEN, Buffer, Group, Mode, Pool, Region

PAGE, LAYER, PART = "page", "layer", "part"


@dataclass(frozen=True)
class TensorView:
    """What a tensor says about itself; strides in bytes."""

    address: Address
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    dtype: str
    memory: Literal["host", "device"]
    device: int

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        reach = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides_bytes, strict=True))
        return reach + self.item_bytes

    def region(self) -> Region:
        return Region(self.address, self.span_bytes, self.memory, self.device)


def view_of(tensor: Any) -> TensorView:
    """Read a tensor's address, shape and strides. DocumentError where it has none or a stride is negative."""
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        view = _from_data_ptr(tensor)
    elif hasattr(tensor, "__array_interface__"):
        view = _from_numpy(np.asarray(tensor))
    elif hasattr(tensor, "__dlpack__"):
        view = _from_dlpack(tensor)
    else:
        raise DocumentError("tensor", f"expected data_ptr, NumPy's array interface or __dlpack__, got {type(tensor)}")
    for axis, stride in enumerate(view.strides_bytes):
        if stride < 0 or (stride == 0 and view.shape[axis] > 1):
            raise DocumentError(f"tensor.strides[{axis}]", f"must be ≥ 1, got {stride}; elements may not share bytes")
    return view


def _from_data_ptr(tensor: Any) -> TensorView:
    item_bytes = int(tensor.element_size())
    device = getattr(tensor, "device", None)
    kind = getattr(device, "type", "cpu")
    return TensorView(
        address=Address(tensor.data_ptr()),
        shape=tuple(int(extent) for extent in tensor.shape),
        strides_bytes=tuple(int(stride) * item_bytes for stride in tensor.stride()),
        item_bytes=item_bytes,
        dtype=_dtype_name(tensor.dtype),
        memory="host" if kind == "cpu" else "device",
        device=getattr(device, "index", None) or 0,
    )


def _from_numpy(array: np.ndarray[Any, Any]) -> TensorView:
    return TensorView(
        address=Address(int(array.__array_interface__["data"][0])),
        shape=array.shape,
        strides_bytes=array.strides,
        item_bytes=array.itemsize,
        dtype=_dtype_name(array.dtype),
        memory="host",
        device=0,
    )


def _from_dlpack(tensor: Any) -> TensorView:
    try:
        return _from_numpy(np.from_dlpack(tensor))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DocumentError("tensor", f"can't be read through __dlpack__ ({error}); give one with data_ptr()") from None


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def pool_of(
    tensor: Any,
    axes: Sequence[str],
    group: Group,
    *,
    layers: Sequence[int] = (),
    parts: Sequence[str] = (),
    owned: Optional[Mapping[str, Sequence[Sequence[int]]]] = None,
    region: int = 0,
    within: Optional[Region] = None,
    table: Optional[str] = None,
) -> tuple[Region, Pool]:
    """The region of one tensor and the pool that lies in it. DocumentError where tensor, names and group don't fit.

    `axes` names each dimension: `"page"`, `"token"`, one of the group's axes, `"layer"` or `"part"`. An axis may be
    named more than once, outermost digit first: `("page", "head", "dim", "token", "dim")` is a vectorised layout.
    Where a dimension is named `"layer"` or `"part"`, `layers` and `parts` say which ones it holds, in order; otherwise
    each lists exactly one. `region` is the index that the region will have in its worker; `within` is a larger region
    that holds the tensor, where that one is to be used.
    """
    view = view_of(tensor)
    start = 0 if within is None else _offset_in(view, within)
    _check_item(view, group)
    steps = _name_dimensions(view, axes, group)
    page_tokens = 1
    modes = []
    for axis, extent, stride in steps:
        if axis not in (PAGE, LAYER, PART):
            modes.append(Mode(axis, extent, max(stride, 1)))
            page_tokens *= extent if axis == TOKEN else 1
    _, pages, page_bytes = next((step for step in steps if step[0] == PAGE), (PAGE, 1, 0))
    buffers = tuple(
        Buffer(layer, part, region, start + layer_offset + part_offset, pages)
        for layer, layer_offset in _spread(steps, LAYER, layers)
        for part, part_offset in _spread(steps, PART, parts)
    )
    segments: dict[str, tuple[Union[int, tuple[int, ...]], ...]] = {
        # the token axis lists numbers (rank, size, block), the others segments
        axis: tuple(tuple(item) if isinstance(item, Sequence) else item for item in values)
        for axis, values in (owned or {}).items()
    }
    # one page has no next one: any positive distance will do
    pool = Pool(group.name, page_tokens, max(page_bytes, 1), tuple(modes), buffers, table, segments)
    return within or view.region(), pool


def _offset_in(view: TensorView, region: Region) -> int:
    """Byte offset of the tensor in `region`."""
    try:
        offset = view.address.distance_from(region.base)
    except AddressError as error:
        raise DocumentError("tensor", f"starts before its region: {error}") from None
    if offset + view.span_bytes > region.bytes:
        raise DocumentError("tensor", f"ends at byte {offset + view.span_bytes} of a region of {region.bytes} bytes")
    return offset


def _check_item(view: TensorView, group: Group) -> None:
    if view.item_bytes != group.item_bytes:
        raise DocumentError(
            "tensor.dtype", f"group {group.name!r} has {group.dtype} of {group.item_bytes} bytes, got {view.dtype}"
        )
    # packed encodings are uint8 to us, whatever the tensor calls them
    if group.dtype != "uint8" and view.dtype in DTYPE_BYTES and view.dtype != group.dtype and view.dtype != "uint8":
        raise DocumentError("tensor.dtype", f"group {group.name!r} has {group.dtype}, got {view.dtype}")


def _name_dimensions(view: TensorView, axes: Sequence[str], group: Group) -> list[tuple[str, int, int]]:
    """(axis, extent, stride in bytes) per dimension, names checked."""
    if len(axes) != len(view.shape):
        raise DocumentError("axes", f"the tensor has {len(view.shape)} dimensions, got {len(axes)} names {list(axes)}")
    known = (PAGE, TOKEN, LAYER, PART, *group.axes)
    for index, axis in enumerate(axes):
        if axis not in known:
            raise DocumentError(f"axes[{index}]", f"expected one of {', '.join(known)}, got {axis!r}")
        if axis in (PAGE, LAYER, PART) and axis in axes[:index]:
            raise DocumentError(f"axes[{index}]", f"{axis!r} may be named once")
    return list(zip(axes, view.shape, view.strides_bytes, strict=True))


def _spread(steps: list[tuple[str, int, int]], axis: str, names: Sequence[Any]) -> list[tuple[Any, int]]:
    """(layer or part, byte offset) for each that the tensor holds."""
    extent, stride = next(((count, step) for name, count, step in steps if name == axis), (1, 0))
    if len(names) != extent:
        raise DocumentError(f"{axis}s", f"the tensor holds {extent} {axis}(s), got {len(names)}: {list(names)}")
    return [(name, index * stride) for index, name in enumerate(names)]
