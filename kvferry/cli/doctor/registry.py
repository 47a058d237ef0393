"""Checks of the registry: whether it answers us, and what it knows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvferry.cli.doctor.finding import Finding
from kvferry.errors import KVFerryError, RegistryError
from kvferry.session.choices import registry_at
from kvferry.session.keys import KEYS_VARIABLE, Access
from kvferry.session.messages import PROTOCOL
from kvferry.session.registry import Listed

AREA = "registry"
ASK_S = 3.0
LATE = 0.5
"""Share of its time to live after which an entry is late: workers renew theirs after a third."""


def ask(url: str, at: Access) -> tuple[list[Finding], tuple[Listed, ...]]:
    """Whether it answers, and what it lists."""
    try:
        listed = registry_at(url, at).listing()
    except KVFerryError as error:
        return [Finding("red", AREA, "answers", str(error), _cure(url, error))], ()
    keys = "with this deployment's keys" if at.keys else "without keys"
    instances = len({one.entry.instance for one in listed})
    text = f"{url}, {keys}: {_count(instances, 'instance')}, {_count(len(listed), 'worker')}"
    if not listed:
        cure = "start the workers with this registry's URL; those that can't register say why in their log"
        return [Finding("yellow", AREA, "answers", text, cure)], ()
    return [Finding("green", AREA, "answers", text)], listed


def instances(listed: Sequence[Listed]) -> list[Finding]:
    """One line for each instance, and one for each entry that is of an earlier start or of another release."""
    found = []
    for name, some in groupby(listed, key=lambda one: one.entry.instance):
        workers = list(some)
        found.append(_complete(name, workers))
        found += [finding for one in workers for finding in _entry(one, workers)]
    return found


def _complete(name: str, workers: Sequence[Listed]) -> Finding:
    world = _newest(workers).entry.world
    there = {one.entry.rank for one in workers if one.entry.world == world}
    absent = [rank for rank in range(world) if rank not in there]
    if not absent:
        return Finding("green", AREA, name, f"complete, {_count(world, 'worker')}")
    ranks = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
    cure = "start those workers, or look into their logs: one that can't register says why"
    return Finding("red", AREA, name, f"{len(there)} of {world} workers, rank {ranks} missing", cure)


def _entry(one: Listed, workers: Sequence[Listed]) -> list[Finding]:
    entry, found = one.entry, []
    name = f"{entry.instance} rank {entry.rank}"
    left_s = one.ttl_s - one.age_s
    if one.superseded:
        problem = (
            f"stale generation: an earlier start, {one.superseded}, is still running and tries to register; "
            f"{entry.generation} is registered"
        )
        found.append(Finding("red", AREA, name, problem, "end the process of the earlier start: nobody can use it"))
    if entry.world != (world := _newest(workers).entry.world):
        problem = f"stale generation: it is of a start with {_count(entry.world, 'worker')}, now there are {world}"
        cure = f"end that worker if it still runs; else the entry expires in {left_s:.0f} s"
        found.append(Finding("yellow", AREA, name, problem, cure))
    if one.age_s > LATE * one.ttl_s:
        problem = f"not renewed for {one.age_s:.1f} s of its {one.ttl_s:g} s: its process is stopped, or has ended"
        cure = f"look at that process; without it the entry expires in {left_s:.0f} s"
        found.append(Finding("yellow", AREA, name, problem, cure))
    if entry.protocol != PROTOCOL:
        problem = f"it speaks protocol {entry.protocol}, this kvferry {PROTOCOL}"
        found.append(Finding("red", AREA, name, problem, "run the same release of kvferry on both sides"))
    return found


def _newest(workers: Sequence[Listed]) -> Listed:
    return max(workers, key=lambda one: one.entry.generation)


def _cure(url: str, error: KVFerryError) -> str:
    text = str(error)
    if not isinstance(error, RegistryError) or "401" in text or "keys" in text:
        return f"use the same folder of keys here ({KEYS_VARIABLE}, --keys) and there; `kvferry keys` makes one"
    if "404" in text:
        return "it is of an earlier release of kvferry that can't list; run the same release there"
    if "expected a URL" in text:
        return "give the URL that `kvferry registry` prints, or the engine at its start"
    return f"start it: `kvferry registry --host … --port …`, or check the URL {url} and the firewall between"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
