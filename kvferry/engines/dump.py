"""The kvferry-dump/1 document: what an engine registered at its start, and the layout that was read from it.

Engines write one file per worker when KVFERRY_DUMP names a folder; `kvferry layout --from-dump` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvferry.errors import DocumentError, EngineError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance, Struct, decode_json, encode_json
from kvferry.layout.tensors import view_of
from kvferry.layout.validate import check_instance


class DumpedTensor(Struct, frozen=True):
    """One registered tensor; strides in elements, as the engine shows them."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    address: Address


class Dump(Struct, frozen=True):
    """`layout` holds the worker of `rank` only."""

    format: Literal["kvferry-dump/1"]
    engine: str
    version: str
    rank: int
    tensors: tuple[DumpedTensor, ...]
    layout: Instance


def write_dump(
    folder: Path, engine: str, version: str, instance: Instance, rank: int, tensors: Mapping[str, Any]
) -> Path:
    """Write this worker's file into `folder`, which is made if need be. EngineError where it can't be written."""
    found = []
    for name, tensor in tensors.items():
        view = view_of(tensor)
        strides = tuple(stride // view.item_bytes for stride in view.strides_bytes)
        found.append(DumpedTensor(name, view.shape, strides, view.dtype, view.address))
    worker = instance.worker(rank)
    layout = Instance(instance.format, instance.instance, instance.model, instance.groups, (worker,))
    document = encode_json(Dump("kvferry-dump/1", engine, version, rank, tuple(found), layout))
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in instance.instance)
    path = folder / f"{engine}-{name}-{rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document + b"\n")
    except OSError as error:
        raise EngineError(f"KVFERRY_DUMP: {path} can't be written: {error.strerror or error}") from None
    return path


def read_dump(path: Path) -> Dump:
    """DocumentError, with the path of the file, for what is no dump."""
    try:
        dump = decode_json(path.read_bytes(), Dump)
        check_instance(dump.layout)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None
    if [worker.rank for worker in dump.layout.workers] != [dump.rank]:
        raise DocumentError(f"{path}: layout.workers", f"expected the one worker of rank {dump.rank}")
    return dump


def merge_dumps(dumps: Sequence[Dump]) -> Instance:
    """The whole instance from the dumps of its workers. DocumentError where they are not of one instance."""
    first = dumps[0].layout
    for dump in dumps[1:]:
        for field in ("instance", "model", "groups"):
            if getattr(dump.layout, field) != getattr(first, field):
                raise DocumentError(field, f"the dumps of ranks {dumps[0].rank} and {dump.rank} are of two instances")
    workers = sorted((dump.layout.workers[0] for dump in dumps), key=lambda worker: worker.rank)
    instance = Instance(first.format, first.instance, first.model, first.groups, tuple(workers))
    check_instance(instance)
    return instance
