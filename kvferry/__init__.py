"""kvferry moves the KV cache of a request from a prefill instance to a decode instance, whatever the two look like.

The names below are loaded on first use, so that `import kvferry` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvferry.errors import KVFerryError
    from kvferry.layout.address import Address
    from kvferry.layout.document import Group, Instance, Pool, Region, Worker
    from kvferry.layout.request import Request, Side, Table, Wanted
    from kvferry.layout.validate import parse_instance, parse_request
    from kvferry.plan.document import make_plan
    from kvferry.session.endpoint import Endpoint
    from kvferry.session.registry import RegistryServer
    from kvferry.transport.memory import HostMemory, map_array, window

_HOMES = {
    "Address": "kvferry.layout.address",
    "Endpoint": "kvferry.session.endpoint",
    "Group": "kvferry.layout.document",
    "HostMemory": "kvferry.transport.memory",
    "Instance": "kvferry.layout.document",
    "KVFerryError": "kvferry.errors",
    "Pool": "kvferry.layout.document",
    "Region": "kvferry.layout.document",
    "RegistryServer": "kvferry.session.registry",
    "Request": "kvferry.layout.request",
    "Side": "kvferry.layout.request",
    "Table": "kvferry.layout.request",
    "Wanted": "kvferry.layout.request",
    "Worker": "kvferry.layout.document",
    "make_plan": "kvferry.plan.document",
    "map_array": "kvferry.transport.memory",
    "parse_instance": "kvferry.layout.validate",
    "parse_request": "kvferry.layout.validate",
    "window": "kvferry.transport.memory",
}

__all__ = [
    "Address",
    "Endpoint",
    "Group",
    "HostMemory",
    "Instance",
    "KVFerryError",
    "Pool",
    "Region",
    "RegistryServer",
    "Request",
    "Side",
    "Table",
    "Wanted",
    "Worker",
    "__version__",
    "make_plan",
    "map_array",
    "parse_instance",
    "parse_request",
    "window",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
