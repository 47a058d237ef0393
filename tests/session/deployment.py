"""Keys for the tests, and endpoints in this process that use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import zmq

from kvferry.session.endpoint import Endpoint
from kvferry.session.keys import Keys
from kvferry.transport.memory import HostMemory, map_array
from tests.session.pools import Shape, WorkerPool, instance

REGISTRY_SECRET = bytes(range(32))


def deployment(*names: str) -> list[Keys]:
    """Members that know each other."""
    pairs = [tuple(half.decode() for half in zmq.curve_keypair()) for _ in names]
    allowed = frozenset(public for public, _ in pairs)
    return [Keys(name, *pair, REGISTRY_SECRET, allowed) for name, pair in zip(names, pairs)]


def only_itself(keys: Keys) -> Keys:
    return replace(keys, allowed=frozenset({keys.public}))


def endpoint(name: str, registry: str, keys: Keys | None, **options: Any) -> Endpoint:
    pool = WorkerPool(Shape(), 0)
    document = instance(name, Shape(), (pool.worker(),))
    memory = HostMemory([map_array(pool.bytes_view)])
    return Endpoint(document, 0, memory, world=1, registry=registry, keys=keys, **options)
