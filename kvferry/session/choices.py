"""What an endpoint may be told at its start, and what of it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from kvferry.errors import DocumentError, KeysError
from kvferry.layout.document import Instance
from kvferry.layout.validate import check_instance
from kvferry.session.keys import HOST_VARIABLE, HOW, Access
from kvferry.session.meeting import Meeting, meeting
from kvferry.session.writing import Gathers
from kvferry.transport.costs import known_costs
from kvferry.transport.hosts import is_loopback, machine_address

Gather = Literal["auto", "always", "never"]
Landing = Literal["slots", "pages"]
GATHER: dict[str, Gathers] = {
    "auto": lambda way, runs, nbytes: known_costs().gathers(way, runs, nbytes),
    "always": lambda way, runs, nbytes: True,
    "never": lambda way, runs, nbytes: False,
}
LANDING = ("slots", "pages")


def check_worker(instance: Instance, rank: int, world: int) -> None:
    check_instance(instance)
    if not 0 <= rank < world or all(worker.rank != rank for worker in instance.workers):
        raise DocumentError("rank", f"expected a worker of {instance.instance!r} below world {world}, got {rank}")


def check_landing(slots: int, slot_bytes: int, gather: str, landing: str) -> None:
    if slots < 1 or slot_bytes < 1:
        raise DocumentError("slots", f"slots and slot_bytes must be ≥ 1, got {slots} × {slot_bytes}")
    _one_of("gather", gather, GATHER)
    _one_of("landing", landing, LANDING)


def registry_at(url: str, at: Access) -> Meeting:
    """KeysError where strangers could be in its place."""
    registry = meeting(url, at.keys)  # RegistryError where it is no URL
    if at.keys is None and not is_loopback(registry.host):
        raise KeysError(f"registry {url}: only one on loopback can be used without keys; {HOW}")
    return registry


def own_registry(url: str, at: Access) -> Meeting:
    """DocumentError where those that find us there could not reach us."""
    registry = registry_at(url, at)
    if is_loopback(at.host) and machine_address(registry.host) and not is_loopback(registry.host):
        raise DocumentError("host", f"{at.host} is out of reach for users of registry {url}; set {HOST_VARIABLE}")
    return registry


def _one_of(field: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise DocumentError(field, f"must be one of {', '.join(allowed)}, got {value!r}")
