"""Who sends what to whom: for one target worker, which source worker it takes each part of its cache from.

Only the target decides, and it decides from the two layouts alone, so every target worker can compute every other
one's decision and the same inputs always give the same answer. Among source workers that own the same cells, targets
are spread evenly; each byte travels once.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from kvferry.errors import IncompatibleError, PlanError
from kvferry.layout.document import Group, Instance, Struct

Segment = tuple[int, int]
Cycle = tuple[int, int, int]
WHOLE: Cycle = (0, 1, 1)
"""The cycle of a worker that holds every token."""


class Box(Struct, frozen=True):
    """A set of cells: layers × parts × axis segments × the tokens that pass every cycle (rank, size, block).

    `axes` lists every axis of the group; its order is their canonical order in a dense chunk.
    """

    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    axes: dict[str, tuple[tuple[int, int], ...]]
    cycles: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Route:
    """`box` comes from source worker `source`; `replicas` are all source workers that could have sent it."""

    source: int
    box: Box
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Owner:
    """What one worker owns of a (group, layer, part)."""

    rank: int
    segments: tuple[tuple[Segment, ...], ...]  # per axis of the group
    cycle: Cycle

    def covers(self, atom: Sequence[Segment]) -> bool:
        return all(
            any(start <= low and high <= stop for start, stop in owned)
            for (low, high), owned in zip(atom, self.segments, strict=True)
        )


def check_compatible(source: Instance, target: Instance) -> None:
    """Raise IncompatibleError, naming the field and both values, unless the two instances cache the same thing."""
    if source.model != target.model:
        raise IncompatibleError(
            "model", source.model, target.model, "both sides must serve the same model and revision"
        )
    ours, theirs = ({g.name: g for g in side.groups} for side in (source, target))
    for name in [*ours, *(n for n in theirs if n not in ours)]:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            present = one or other
            if present is not None and not present.optional:
                sides = ("present", "missing") if one else ("missing", "present")
                raise IncompatibleError(f"groups.{name}", *sides, "mark the group optional if one side may lack it")
            continue
        _check_group(one, other)


def _check_group(source: Group, target: Group) -> None:
    def canonical(group: Group) -> dict[str, object]:
        return {
            "growth": group.growth,
            "dtype": group.dtype,
            "encoding": group.encoding,
            "layers": sorted(group.layers),
            "parts": sorted(group.parts),
            "axes": dict(sorted(group.axes.items())),
            "constants": dict(sorted(group.constants.items())),
        }

    theirs = canonical(target)
    for field, value in canonical(source).items():
        if value != theirs[field]:
            raise IncompatibleError(
                f"groups.{source.name}.{field}",
                getattr(source, field),
                getattr(target, field),
                "both sides must cache the same logical array",
            )


def shared_groups(source: Instance, target: Instance) -> list[Group]:
    """Groups that both sides have, as the target describes them."""
    names = {group.name for group in source.groups}
    return [group for group in target.groups if group.name in names]


def route(
    source: Instance, target: Instance, target_rank: int, down: frozenset[int] = frozenset()
) -> tuple[Route, ...]:
    """Routes of everything that target worker `target_rank` holds; PlanError names the first cell that no source
    worker owns.

    `down`: source ranks that must not be used; other replicas take over.
    """
    routes: list[Route] = []
    for group in shared_groups(source, target):
        sources, targets = owners(source, group), owners(target, group)
        nobody = Owners.of((), len(group.axes))
        classes: dict[tuple[int, int, int], tuple[Owner, Owners, Owners, dict[int, list[str]]]] = {}
        for layer, part in itertools.product(group.layers, group.parts):
            takers = targets.get((layer, part), nobody)
            mine = takers.by_rank.get(target_rank)
            if mine is not None:
                senders = sources.get((layer, part), nobody)
                key = (id(mine), id(senders), id(takers))
                classes.setdefault(key, (mine, senders, takers, {}))[3].setdefault(layer, []).append(part)
        for mine, senders, takers, layers in classes.values():
            by_parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
            for layer, parts in layers.items():
                by_parts[tuple(parts)].append(layer)
            for parts_key, layer_list in by_parts.items():
                routes += _route_class(group, tuple(layer_list), parts_key, mine, senders, takers, down)
    return tuple(routes)


class Owners(tuple[Owner, ...]):
    """Everybody who owns one (layer, part), by rank, indexed so that a lookup doesn't scan them all.

    Per axis, `borders` are where anybody's segments begin or end, sorted, and `holders[i]` the positions of those who
    own the indices from `borders[i]` to the next border.
    """

    by_rank: dict[int, Owner]
    borders: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[frozenset[int], ...], ...]

    @staticmethod
    def of(found: Sequence[Owner], axes: int) -> Owners:
        owners = Owners(found)
        owners.by_rank = {owner.rank: owner for owner in found}
        cuts = [
            sorted({edge for owner in found for segment in owner.segments[axis] for edge in segment})
            for axis in range(axes)
        ]
        owners.borders = tuple(map(tuple, cuts))
        owners.holders = tuple(_holders(found, axis, cuts[axis]) for axis in range(axes))
        return owners

    def covering(self, atom: Sequence[Segment]) -> list[Owner]:
        """Those who own all of `atom`, which no border cuts, by rank."""
        per_axis = []
        for (low, _), borders, holders in zip(atom, self.borders, self.holders, strict=True):
            at = bisect_right(borders, low) - 1
            per_axis.append(holders[at] if at >= 0 else frozenset())
        if not per_axis:
            return list(self)
        per_axis.sort(key=len)
        return [self[i] for i in sorted(per_axis[0].intersection(*per_axis[1:]))]


def _holders(found: Sequence[Owner], axis: int, borders: Sequence[int]) -> tuple[frozenset[int], ...]:
    sets: list[set[int]] = [set() for _ in borders]
    for position, owner in enumerate(found):
        for start, stop in owner.segments[axis]:
            for at in range(bisect_left(borders, start), bisect_left(borders, stop)):
                sets[at].add(position)
    return tuple(map(frozenset, sets))


_index: dict[tuple[int, str, tuple[tuple[str, int], ...]], tuple[Instance, dict[tuple[int, str], Owners]]] = {}
_INDEXES = 32


def owners(instance: Instance, group: Group) -> dict[tuple[int, str], Owners]:
    """Who owns each (layer, part) of `group`; equal ones are the same object.

    Kept for the last few instances: every worker of a pair routes over the same two, and the index is all that grows
    with the number of workers.
    """
    key = (id(instance), group.name, tuple(group.axes.items()))
    if key in _index:
        return _index[key][1]
    found: dict[tuple[int, str], list[Owner]] = defaultdict(list)
    for worker in sorted(instance.workers, key=lambda w: w.rank):
        for pool in worker.pools:
            if pool.group == group.name:
                segments = tuple(pool.segments(axis, extent) for axis, extent in group.axes.items())
                owner = Owner(worker.rank, segments, pool.cycle)
                for buffer in pool.buffers:
                    found[buffer.layer, buffer.part].append(owner)
    distinct: dict[tuple[int, ...], Owners] = {}
    index = {}
    for at, some in found.items():
        same = tuple(id(owner) for owner in some)
        if same not in distinct:
            distinct[same] = Owners.of(some, len(group.axes))
        index[at] = distinct[same]
    while len(_index) >= _INDEXES:
        _index.pop(next(iter(_index)), None)
    _index[key] = (instance, index)  # holds the instance, so its id stays its own
    return index


def _route_class(
    group: Group,
    layers: tuple[int, ...],
    parts: tuple[str, ...],
    mine: Owner,
    senders: Owners,
    takers: Owners,
    down: frozenset[int],
) -> Iterator[Route]:
    """Routes for layers × parts that the same workers own in the same way on both sides."""
    axes = list(group.axes)
    chosen: dict[tuple[int, Cycle, tuple[int, ...]], list[tuple[Segment, ...]]] = defaultdict(list)
    for atom in itertools.product(
        *(_atoms(mine.segments[i], senders.borders[i], takers.borders[i]) for i in range(len(axes)))
    ):
        able = [owner for owner in senders.covering(atom) if owner.rank not in down]
        wanting = [owner.rank for owner in takers.covering(atom)]
        for cycle, replicas in _by_cycle(able, mine.cycle):
            if not replicas:
                where = ", ".join(f"{axis} {low}" for axis, (low, _) in zip(axes, atom, strict=True)) or "its only cell"
                tokens = "" if cycle == WHOLE else f", tokens of cycle {list(cycle)}"
                raise PlanError(
                    f"group {group.name}, layer {layers[0]}, part {parts[0]}, {where}{tokens}: "
                    f"target worker {mine.rank} wants it, no source worker that is up owns it"
                )
            # spread the workers that want this atom evenly over those that have it
            rank = replicas[wanting.index(mine.rank) * len(replicas) // len(wanting)]
            chosen[rank, cycle, tuple(replicas)].append(atom)
    for (rank, cycle, ranks), atoms in chosen.items():
        cycles = tuple(c for c in dict.fromkeys((cycle, mine.cycle)) if c[1] > 1)
        for segments in _merge(atoms):
            yield Route(rank, Box(group.name, layers, parts, dict(zip(axes, segments, strict=True)), cycles), ranks)


def _atoms(segments: Sequence[Segment], *borders: tuple[int, ...]) -> list[Segment]:
    """My segments of one axis, cut wherever anybody's ownership begins or ends; in an atom all indices have the same
    owners.
    """
    atoms: list[Segment] = []
    for start, stop in segments:
        cuts = {cut for some in borders for cut in some[bisect_right(some, start) : bisect_left(some, stop)]}
        atoms += itertools.pairwise([start, *sorted(cuts), stop])
    return sorted(atoms)


def _by_cycle(able: Sequence[Owner], wanted: Cycle) -> Iterator[tuple[Cycle, list[int]]]:
    """Cut the wanted tokens by the source's cycles: each (cycle, ranks that own it). Ranks are empty for one that
    nobody owns.

    Sources may be cut in several ways (all of the tokens here, every eighth there); the coarsest complete way is used.
    """
    by_family: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for owner in able:
        rank, size, block = owner.cycle
        by_family[(1, 1) if size == 1 else (size, block)][rank].append(owner.rank)
    best: list[tuple[Cycle, list[int]]] | None = None
    for (size, block), ranks in sorted(by_family.items()):
        cycles = [(r, size, block) for r in range(size) if _meets((r, size, block), wanted)]
        parts = [(cycle, sorted(ranks.get(cycle[0], []))) for cycle in cycles]
        if all(owners for _, owners in parts):
            yield from parts
            return
        best = best or parts
    yield from best or [(WHOLE, [])]


def _meets(one: Cycle, other: Cycle) -> bool:
    """Whether any token passes both cycles. By the Chinese remainder theorem there is one where the two blocks, as
    residues modulo the greatest common divisor of the periods, have one in common.
    """
    period = gcd(one[1] * one[2], other[1] * other[2])
    apart = (other[0] * other[2] - one[0] * one[2]) % period
    return apart < one[2] or period - apart < other[2]


def _merge(atoms: list[tuple[Segment, ...]]) -> Iterator[tuple[tuple[Segment, ...], ...]]:
    """Join atoms into boxes: along one axis, atoms that agree on all others become one box with joined segments."""
    if not atoms[0]:
        yield ()
        return
    varying = [i for i in range(len(atoms[0])) if len({atom[i] for atom in atoms}) > 1]
    along = varying[0] if varying else 0
    rows: dict[tuple[Segment, ...], list[Segment]] = defaultdict(list)
    for atom in atoms:
        rows[atom[:along] + atom[along + 1 :]].append(atom[along])
    for rest, segments in rows.items():
        joined: list[Segment] = []
        for start, stop in sorted(segments):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        others = [(segment,) for segment in rest]
        yield (*others[:along], tuple(joined), *others[along:])
