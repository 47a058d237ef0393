"""What a request wants: checked against what both sides have, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from kvferry.errors import PlanError
from kvferry.layout.document import Group, Instance, Worker
from kvferry.layout.request import Wanted
from kvferry.plan.bind import token_runs
from kvferry.plan.route import shared_groups


def check_wanted(source: Instance, target: Instance, groups: Mapping[str, Wanted]) -> None:
    """PlanError unless `groups` names every group that both sides must have, and each in that group's way."""
    shared = {group.name: group for group in shared_groups(source, target)}
    for name, group in shared.items():
        if name not in groups and not group.optional:
            raise PlanError(f"group {name}: the request doesn't name it; name it with tokens [0, 0] to move none of it")
    for name, wanted in groups.items():
        if name not in shared:
            raise PlanError(f"group {name}: the request names it, but not both sides have it")
        if (wanted.tokens is None) != (shared[name].growth == "state"):
            needs = "a position" if shared[name].growth == "state" else "tokens"
            raise PlanError(f"group {name}: it grows by {shared[name].growth}, so the request must give {needs}")
        start, stop = wanted.token_range
        if not 0 <= start <= stop:
            raise PlanError(f"group {name}: tokens must be 0 ≤ start ≤ stop, got [{start}, {stop})")


def owned_bytes(worker: Worker, group: Group, tokens: tuple[int, int]) -> int:
    """Bytes that `worker` owns of the group's tokens, counted from its layout alone."""
    total = 0
    for pool in worker.pools:
        if pool.group == group.name:
            cells = prod(sum(b - a for a, b in pool.segments(axis, extent)) for axis, extent in group.axes.items())
            count = int(token_runs(tokens, [pool.cycle])[1].sum())
            total += cells * count * len(pool.buffers) * group.item_bytes
    return total
