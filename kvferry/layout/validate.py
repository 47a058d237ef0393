"""Checks of instance and request documents: what the numbers mean, beyond their types. Each fault names its path.

Nothing here wraps: sizes and addresses are Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Union

from kvferry.errors import DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import DTYPE_BYTES, TOKEN, Buffer, Group, Instance, Pool, Region, Worker
from kvferry.layout.locate import decode
from kvferry.layout.overlap import TooIrregular, first_overlap
from kvferry.layout.request import Request, Side, Table, Wanted

_LIMIT = 1 << 63


def parse_instance(data: Union[bytes, str]) -> Instance:
    """Decode and check a kvferry-instance/1 document; DocumentError names the first bad field."""
    return check_instance(decode(data, Instance))


def parse_request(data: Union[bytes, str], source: Instance, target: Instance) -> Request:
    """Decode a kvferry-request/1 document and check it against both instances; DocumentError as above."""
    return check_request(decode(data, Request), source, target)


def check_instance(instance: Instance) -> Instance:
    """Return `instance` if every number in it makes sense, else raise DocumentError."""
    _some(instance.instance, "instance")
    _some(instance.groups, "groups")
    _distinct([group.name for group in instance.groups], "groups", "name")
    for index, group in enumerate(instance.groups):
        _check_group(group, f"groups[{index}]")
    _some(instance.workers, "workers")
    _distinct([worker.rank for worker in instance.workers], "workers", "rank")
    groups = {group.name: group for group in instance.groups}
    for index, worker in enumerate(instance.workers):
        _check_worker(worker, groups, f"workers[{index}]")
    return instance


def _check_group(group: Group, path: str) -> None:
    _some(group.name, f"{path}.name")
    if group.dtype not in DTYPE_BYTES:
        raise DocumentError(f"{path}.dtype", f"expected one of {', '.join(DTYPE_BYTES)}, got {group.dtype!r}")
    _some(group.encoding, f"{path}.encoding")
    if group.encoding != "raw" and group.dtype != "uint8":
        raise DocumentError(
            f"{path}.encoding", f'{group.encoding!r} is a private encoding and needs dtype "uint8", got {group.dtype!r}'
        )
    _some(group.layers, f"{path}.layers")
    for index, layer in enumerate(group.layers):
        _at_least(0, layer, f"{path}.layers[{index}]", "layer")
    _distinct(group.layers, f"{path}.layers")
    _some(group.parts, f"{path}.parts")
    for index, part in enumerate(group.parts):
        _some(part, f"{path}.parts[{index}]")
    _distinct(group.parts, f"{path}.parts")
    for axis, extent in group.axes.items():
        _some(axis, f"{path}.axes")
        if axis == TOKEN:
            raise DocumentError(f"{path}.axes.{axis}", "the token axis belongs to every group and is not listed")
        _at_least(1, extent, f"{path}.axes.{axis}", "size")


def _check_worker(worker: Worker, groups: dict[str, Group], path: str) -> None:
    _at_least(0, worker.rank, f"{path}.rank", "rank")
    for index, region in enumerate(worker.regions):
        _check_region(region, f"{path}.regions[{index}]")
    seen: dict[tuple[str, int, str], str] = {}
    for index, pool in enumerate(worker.pools):
        where = f"{path}.pools[{index}]"
        if pool.group not in groups:
            raise DocumentError(f"{where}.group", f"no group is named {pool.group!r}; expected one of {_names(groups)}")
        group = groups[pool.group]
        _check_pool(pool, group, where)
        for number, buffer in enumerate(pool.buffers):
            at = f"{where}.buffers[{number}]"
            _check_buffer(buffer, pool, group, worker.regions, at)
            key = (pool.group, buffer.layer, buffer.part)
            if key in seen:
                raise DocumentError(at, f"layer {key[1]}, part {key[2]!r} of group {key[0]!r} is already {seen[key]}")
            seen[key] = at
        _check_overlap(pool, group, worker.regions, where)


def _check_region(region: Region, path: str) -> None:
    _at_least(1, region.bytes, f"{path}.bytes", "size")
    if not region.base.spans(region.bytes):
        raise DocumentError(f"{path}.bytes", f"{region.base} + {region.bytes} bytes passes 2**64")
    _at_least(0, region.device, f"{path}.device", "device")


def _check_pool(pool: Pool, group: Group, path: str) -> None:
    if pool.table is not None:
        _some(pool.table, f"{path}.table")
    _at_least(1, pool.page_tokens, f"{path}.page_tokens", "page_tokens")
    if group.growth == "state" and pool.page_tokens != 1:
        raise DocumentError(f"{path}.page_tokens", f"must be 1, a state's page is its row, got {pool.page_tokens}")
    _at_least(1, pool.page_bytes, f"{path}.page_bytes", "page_bytes")
    _check_owned(pool, group, f"{path}.owned")
    extents: dict[str, int] = dict.fromkeys([*group.axes, TOKEN], 1)
    for index, mode in enumerate(pool.modes):
        if mode.axis not in extents:
            raise DocumentError(f"{path}.modes[{index}][0]", _no_axis(group, mode.axis))
        nothing = mode.axis in group.axes and pool.owned.get(mode.axis) == ()
        _at_least(0 if nothing else 1, mode.extent, f"{path}.modes[{index}][1]", "extent")
        _at_least(1, mode.stride_bytes, f"{path}.modes[{index}][2]", "stride")
        extents[mode.axis] *= mode.extent
    for axis, extent in extents.items():
        if axis == TOKEN:
            count, what = pool.page_tokens, "page_tokens is"
        else:
            count = sum(stop - start for start, stop in pool.segments(axis, group.axes[axis]))
            what = "the worker owns"
        if extent != count:
            problem = f"the extents of axis {axis!r} multiply to {extent}, but {what} {count}"
            raise DocumentError(f"{path}.modes", problem)


def _check_owned(pool: Pool, group: Group, path: str) -> None:
    for axis, owned in pool.owned.items():
        where = f"{path}.{axis}"
        if axis == TOKEN:
            _check_cycle(owned, group, where)
        elif axis not in group.axes:
            raise DocumentError(where, _no_axis(group, axis))
        else:
            _check_segments(owned, group.axes[axis], where)


def _check_cycle(owned: tuple[Union[int, tuple[int, ...]], ...], group: Group, path: str) -> None:
    numbers = [number for number in owned if isinstance(number, int)]
    if len(owned) != 3 or len(numbers) != 3:
        raise DocumentError(path, f"expected [rank, size, block], got {_plain(owned)}")
    rank, size, block = numbers
    _at_least(1, size, f"{path}[1]", "size")
    _at_least(0, rank, f"{path}[0]", "rank")
    if rank >= size:
        raise DocumentError(f"{path}[0]", f"rank must be below size {size}, got {rank}")
    _at_least(1, block, f"{path}[2]", "block")
    if group.growth == "state" and size != 1:
        raise DocumentError(path, f"a state has no tokens to share out, so size must be 1, got {size}")


def _check_segments(owned: tuple[Union[int, tuple[int, ...]], ...], extent: int, path: str) -> None:
    spans: list[tuple[int, int, int]] = []
    for index, segment in enumerate(owned):
        where = f"{path}[{index}]"
        if isinstance(segment, int) or len(segment) != 2:
            raise DocumentError(where, f"expected [start, stop], got {_plain(segment)}")
        start, stop = segment
        _at_least(0, start, f"{where}[0]", "start")
        if stop <= start:
            raise DocumentError(f"{where}[1]", f"stop must be above start {start}, got {stop}")
        if stop > extent:
            raise DocumentError(f"{where}[1]", f"stop must be ≤ {extent}, the size of the axis, got {stop}")
        spans.append((start, stop, index))
    spans.sort()
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            low, high = sorted((first, second))
            raise DocumentError(f"{path}[{high}]", f"overlaps segment [{low}] from index {start} on")


def _check_buffer(buffer: Buffer, pool: Pool, group: Group, regions: tuple[Region, ...], path: str) -> None:
    if buffer.layer not in group.layers:
        raise DocumentError(f"{path}[0]", f"group {group.name!r} has no layer {buffer.layer}")
    if buffer.part not in group.parts:
        raise DocumentError(
            f"{path}[1]", f"group {group.name!r} has no part {buffer.part!r}; expected one of {_names(group.parts)}"
        )
    if not 0 <= buffer.region < len(regions):
        raise DocumentError(f"{path}[2]", f"expected a region below {len(regions)}, got {buffer.region}")
    _at_least(0, buffer.offset_bytes, f"{path}[3]", "offset")
    _at_least(1, buffer.pages, f"{path}[4]", "pages")
    end = buffer.offset_bytes + (buffer.pages - 1) * pool.page_bytes + _page_span(pool, group)
    size = regions[buffer.region].bytes
    if buffer.offset_bytes >= size:
        problem = f"offset must be below {size}, the bytes of region {buffer.region}, got {buffer.offset_bytes}"
        raise DocumentError(f"{path}[3]", problem)
    if end > size:
        raise DocumentError(path, f"the last page ends at byte {end} of region {buffer.region}, which has {size} bytes")


def _page_span(pool: Pool, group: Group) -> int:
    """Bytes from a page's first element to the end of its last one; 0 where the worker owns nothing."""
    if math.prod(mode.extent for mode in pool.modes) == 0:
        return 0
    return sum((mode.extent - 1) * mode.stride_bytes for mode in pool.modes) + group.item_bytes


def _check_overlap(pool: Pool, group: Group, regions: tuple[Region, ...], path: str) -> None:
    lattice = [(mode.extent, mode.stride_bytes) for mode in pool.modes]
    # regions may overlap, so all buffers are measured from the lowest one
    bases = [regions[buffer.region].base for buffer in pool.buffers]
    lowest = min(bases, key=lambda base: base.value, default=Address(0))
    starts = [
        (base.distance_from(lowest) + buffer.offset_bytes, buffer.pages)
        for base, buffer in zip(bases, pool.buffers, strict=True)
    ]
    try:
        found = first_overlap(lattice, pool.page_bytes, group.item_bytes, starts)
    except TooIrregular as error:
        raise DocumentError(f"{path}.modes", f"can't be shown to be free of overlaps: {error}") from None
    if found is None:
        return
    first, second = sorted(found)
    if first == second:
        raise DocumentError(
            f"{path}.modes",
            f"two elements of buffers[{first}] share a byte; make the strides or page_bytes {pool.page_bytes} larger",
        )
    raise DocumentError(f"{path}.buffers[{second}]", f"shares bytes with buffers[{first}]")


def check_request(request: Request, source: Instance, target: Instance) -> Request:
    """Return `request` if it fits both instances, else raise DocumentError. Page numbers are the planner's to check."""
    ours = {group.name: group for group in source.groups}
    theirs = {group.name: group for group in target.groups}
    for name, wanted in request.groups.items():
        path = f"groups.{name}"
        for side, instance, groups in (("source", source, ours), ("target", target, theirs)):
            if name not in groups:
                problem = f"{side} {instance.instance!r} has no such group; expected one of {_names(groups)}"
                raise DocumentError(path, problem)
        _check_wanted(wanted, ours[name], path)
    for name, group in ours.items():
        if name in theirs and name not in request.groups and not (group.optional and theirs[name].optional):
            raise DocumentError(
                f"groups.{name}",
                "missing: both sides cache this group, so say what of it to move (an empty range moves nothing)",
            )
    _check_side(request.source, source, "source")
    _check_side(request.target, target, "target")
    return request


def _check_wanted(wanted: Wanted, group: Group, path: str) -> None:
    if group.growth == "state":
        if wanted.position is None or wanted.tokens is not None:
            raise DocumentError(path, "a state group is named by its position, not by tokens")
        _at_least(0, wanted.position, f"{path}.position", "position")
        return
    if wanted.tokens is None or wanted.position is not None:
        raise DocumentError(path, "a token group is named by its tokens [start, stop), not by a position")
    start, stop = wanted.tokens
    _at_least(0, start, f"{path}.tokens[0]", "start")
    if stop < start:
        raise DocumentError(f"{path}.tokens[1]", f"stop must be ≥ start {start}, got {stop}")
    _at_least(0, stop, f"{path}.tokens[1]", "stop")


def _check_side(side: Side, instance: Instance, path: str) -> None:
    ranks = {str(worker.rank): worker for worker in instance.workers}
    for key, override in side.workers.items():
        if key not in ranks:
            problem = f"{instance.instance!r} has no such rank; expected one of {_names(ranks)}"
            raise DocumentError(f"{path}.workers.{key}", problem)
        for name, table in override.tables.items():
            _check_table(table, name, [ranks[key]], f"{path}.workers.{key}.tables.{name}")
    for name, table in side.tables.items():
        own = {key for key, override in side.workers.items() if name in override.tables}
        plain = [worker for key, worker in ranks.items() if key not in own]
        _check_table(table, name, plain, f"{path}.tables.{name}")


def _check_table(table: Table, name: str, workers: list[Worker], path: str) -> None:
    for index, page in enumerate(table.pages):
        if page is not None:
            _at_least(0, page, f"{path}.pages[{index}]", "page")
    _at_least(0, table.start, f"{path}.start", "start")
    for worker in workers:
        for pool in worker.pools:
            _, size, block = pool.cycle
            if pool.table_name == name and size > 1 and table.start % (block * size):
                raise DocumentError(
                    f"{path}.start",
                    f"must be a multiple of block × size = {block * size} of rank {worker.rank}, got {table.start}",
                )


def _at_least(lowest: int, value: int, path: str, name: str) -> None:
    if value < lowest:
        raise DocumentError(path, f"{name} must be ≥ {lowest}, got {value}")
    if value >= _LIMIT:
        raise DocumentError(path, f"{name} must be below 2**63, got {value}")


def _some(value: Union[str, tuple[object, ...]], path: str) -> None:
    if not value:
        raise DocumentError(path, "must not be empty")


def _distinct(values: Sequence[Union[str, int]], path: str, field: str = "") -> None:
    seen: dict[object, int] = {}
    for index, value in enumerate(values):
        if value in seen:
            at = f"{path}[{index}].{field}" if field else f"{path}[{index}]"
            raise DocumentError(at, f"{value!r} is already {path}[{seen[value]}]")
        seen[value] = index


def _no_axis(group: Group, axis: str) -> str:
    return f"group {group.name!r} has no axis {axis!r}; expected one of {_names([*group.axes, TOKEN])}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _plain(value: object) -> object:
    """Tuples as the lists that the document had."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
