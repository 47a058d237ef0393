"""A peer of a vLLM server that is no vLLM: an endpoint of the test's own, and what it can do to the server's ports."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from kvferry.engines.vllm.params import make_params
from kvferry.layout.document import decode_msgpack
from kvferry.layout.presets import memory_bytes, uniform_instance
from kvferry.layout.request import Side, Table, Wanted
from kvferry.session.endpoint import Endpoint
from kvferry.session.registry import Registry, RegistryServer
from kvferry.transport.base import Export
from kvferry.transport.memory import HostMemory, map_array

LAYERS, HEADS, DIM = 4, 4, 32
"""The tiny model's."""
PAGE_TOKENS, PAGES = 16, 40


@dataclass
class OwnPeer:
    """An instance with one worker; `memory` is all of its pages."""

    name: str
    endpoint: Endpoint
    registry: str
    memory: np.ndarray[Any, Any]

    def params(self, request: str, tokens: int) -> dict[str, Any]:
        """What a router would pass on to decode."""
        return make_params(
            engine=self.name, request=request, registry=self.registry, tokens=tokens, blocks=[], tp=1, pp=1
        )

    def offer(self, request: str, tokens: int) -> Any:
        """Send tokens [0, tokens) of our pages, whatever lies there."""
        return self.endpoint.send(f"{self.name}/{request}", {"attn": Wanted((0, tokens))}, pages(), timeout_s=30.0)

    def take(self, params: dict[str, Any], tokens: int, timeout_s: float = 20.0) -> Any:
        """Fetch what a prefill server has announced into our pages."""
        transfer = f"{params['remote_engine_id']}/{params['remote_request_id']}"
        url = f"http://{params['remote_host']}:{params['remote_port']}"
        return self.endpoint.receive(
            transfer,
            params["remote_engine_id"],
            {"attn": Wanted((0, tokens))},
            pages(),
            timeout_s=timeout_s,
            registry=url,
        )


def pages() -> Side:
    return Side({"attn": Table(tuple(range(PAGES)))})


@contextmanager
def own_peer(name: str, model: str, **changed: Any) -> Iterator[OwnPeer]:
    """An instance of the tiny model in `[token][head][dim]` pages of 16 tokens, or `changed` in what it says of it."""
    shape = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", "model": model, **changed}
    layout = {"page_tokens": PAGE_TOKENS, "pages": PAGES, "layout": "nhd"}
    memory = np.zeros(memory_bytes(uniform_instance(name, tp=1, **shape, **layout).workers[0]), np.uint8)
    document = uniform_instance(name, tp=1, bases=memory.ctypes.data, **shape, **layout)
    host = HostMemory([map_array(memory)])
    with RegistryServer() as registry, Endpoint(document, 0, host, world=1, registry=registry.url) as endpoint:
        yield OwnPeer(name, endpoint, registry.url, memory)


@dataclass(frozen=True)
class Ports:
    """Where a server's worker listens: the instance's registry, its control socket and its data port."""

    registry: str
    engine: str
    control: str
    generation: int
    data: tuple[str, int]
    key: bytes


def ports_of(params: dict[str, Any], peer: OwnPeer) -> Ports:
    """What a prefill server's answer leads to, found as any decode instance would find it."""
    registry = f"http://{params['remote_host']}:{params['remote_port']}"
    engine = params["remote_engine_id"]
    (entry,) = Registry(registry).instance(engine).workers
    peer.endpoint.connect(engine, timeout_s=10.0, registry=registry)
    known = {p: card for p, card in peer.endpoint._machine.core.known.items() if p.instance == engine}
    export = decode_msgpack(next(iter(known.values())).export, Export)
    assert export.tcp is not None
    return Ports(registry, engine, entry.address, entry.generation, (export.tcp.host, export.tcp.port), export.key)


def throw(at: tuple[str, int], *messages: bytes) -> None:
    """Raw bytes over TCP, each over a connection of its own, closed without reading."""
    for message in messages:
        with suppress(OSError), socket.create_connection(at, timeout=2) as line:
            line.sendall(message)


def say(address: str, *messages: bytes) -> None:
    """Frames to a ZeroMQ socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 2000)
        dealer.connect(address)
        for message in messages:
            dealer.send(message)


def put(registry: str, body: bytes, instance: str) -> int:
    """The HTTP status of a registration as raw as it comes; 0 where the connection broke."""
    request = urllib.request.Request(f"{registry}/v1/instances/{instance}", body, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return 0


def junk() -> tuple[bytes, ...]:
    """Nothing that any of our ports could understand."""
    return (
        b"",
        b"\0" * 64,
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n" + b"x" * 70_000,
        b"\xff" * (1 << 20),
        b"kvfF" + b"\xff" * 64,
    )
