"""The kvferry-instance/1 document: what one instance caches and where each worker keeps it.

The structs are the document: JSON for people and files, MessagePack on the wire. Meaning of each field:
docs/reference/formats.md. Decoding checks types and unknown fields; `kvferry.layout.validate` checks what the numbers
mean.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from kvferry.errors import AddressError, DocumentError
from kvferry.layout.address import Address

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
TOKEN = "token"
"""The axis that pages cut; it is no member of a group's `axes`."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the documents' objects: immutable, unknown fields refused."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of the documents' fixed-length arrays."""


class Group(Struct, frozen=True):
    """What is logically cached: an array over (layer, part, token, axes…)."""

    name: str
    growth: Literal["token", "state"]
    dtype: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    axes: dict[str, int]
    encoding: str = "raw"
    constants: dict[str, str | float | int | bool | None] = {}
    optional: bool = False

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


class Region(Struct, frozen=True):
    """A span of memory on one worker."""

    base: Address
    bytes: int
    memory: Literal["host", "device"] = "host"
    device: int = 0


class Mode(Row, frozen=True):
    """One (axis, extent, stride) of the layout inside a page; the stride is in bytes."""

    axis: str
    extent: int
    stride_bytes: int


class Buffer(Row, frozen=True):
    """Where page 0 of one (layer, part) starts, and how many pages there are."""

    layer: int
    part: str
    region: int
    offset_bytes: int
    pages: int


class Pool(Struct, frozen=True):
    """Where a part of a group lies on one worker."""

    group: str
    page_tokens: int
    page_bytes: int
    modes: tuple[Mode, ...]
    buffers: tuple[Buffer, ...]
    table: str | None = None
    owned: dict[str, tuple[int | tuple[int, ...], ...]] = {}

    @property
    def table_name(self) -> str:
        return self.group if self.table is None else self.table

    @property
    def cycle(self) -> tuple[int, int, int]:
        """(rank, size, block) of cyclic context parallelism; (0, 1, 1) where the worker holds every token."""
        rank, size, block = self.owned.get(TOKEN, (0, 1, 1))  # shape checked by validate
        return rank, size, block  # type: ignore[return-value]  # three integers: validate has seen to it

    def segments(self, axis: str, extent: int) -> tuple[tuple[int, int], ...]:
        """Owned global indices of `axis` as (start, stop) in local order; `extent` is the axis's global size."""
        return self.owned.get(axis, ((0, extent),))  # type: ignore[return-value]  # pairs: likewise


class Worker(Struct, frozen=True):
    rank: int
    regions: tuple[Region, ...]
    pools: tuple[Pool, ...]


class Instance(Struct, frozen=True):
    """One prefill or decode instance: one data-parallel replica."""

    format: Literal["kvferry-instance/1"]
    instance: str
    model: str
    groups: tuple[Group, ...]
    workers: tuple[Worker, ...]

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def worker(self, rank: int) -> Worker:
        return next(worker for worker in self.workers if worker.rank == rank)


T = TypeVar("T")


def _decode_address(kind: type, value: Any) -> Any:
    if kind is Address:
        try:
            return Address.parse(value)
        except AddressError as error:
            raise ValueError(str(error)) from None
    raise NotImplementedError(kind)


def _encode_address(value: Any) -> Any:
    if isinstance(value, Address):
        return str(value)
    raise NotImplementedError(type(value))


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """Decode a document of type `kind`; DocumentError names the path of the first bad field."""
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_decode_address)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _document_error(error) from None


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """As `decode_json`, for the control plane's MessagePack."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_address)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _document_error(error) from None


def encode_json(document: object) -> bytes:
    return msgspec.json.encode(document, enc_hook=_encode_address)


def encode_msgpack(document: object) -> bytes:
    return msgspec.msgpack.encode(document, enc_hook=_encode_address)


def _document_error(error: Exception) -> DocumentError:
    """Turn msgspec's «problem - at `$.a[0]`» into our «a[0]: problem»."""
    problem, _, tail = str(error).partition(" - at `")
    path = tail.rstrip("`").removeprefix("$").lstrip(".")
    if not problem.startswith("JSON"):
        problem = problem[:1].lower() + problem[1:]
    return DocumentError(path, problem.replace("`", ""))
