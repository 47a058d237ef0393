"""Broken and hostile input on real sockets: what listens there goes on, and serves the next one who behaves."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from kvferry.errors import KVFerryError
from kvferry.layout.request import Wanted
from kvferry.session import messages
from kvferry.session.endpoint import Endpoint
from kvferry.session.registry import Entry, Registry, RegistryServer
from kvferry.transport.memory import HostMemory, map_array
from tests.fuzz.decoders import _traffic
from tests.fuzz.mutate import MSGPACK, broken
from tests.fuzz.test_decoders import INPUTS, SEED
from tests.session.pools import Shape, WorkerPool, instance, table

COUNT = max(100, INPUTS // 100)
REQUESTS = [
    b"GET /v1/instances/p HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"DELETE /v1/instances/p/0/1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b'PUT /v1/instances/p HTTP/1.1\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{"entry":',
]


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What ended a thread of this process."""
    found: list[object] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield found
    assert not found


def say(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass


def test_the_registry_goes_on(uncaught: list[object]) -> None:
    rng = random.Random(SEED)
    with RegistryServer() as server:
        client = Registry(server.url)
        for _ in range(COUNT):
            say((client.host, client._port), broken(rng, REQUESTS, None))
        client.put(Entry("q", 1, 0, 1, "tcp://127.0.0.1:5"), 10.0)
        assert client.instance("q").ready


def test_an_endpoint_goes_on(uncaught: list[object]) -> None:
    """Strangers send junk to its control socket; a peer that it knows says whatever decodes. Then a transfer works."""
    shape, rng = Shape(), random.Random(SEED)
    ours, theirs = WorkerPool(shape, 0), WorkerPool(shape, 0)
    ours.fill([0, 1], 0, (0, 8))
    with RegistryServer() as server, _open("p", ours, server.url) as source, _open("d", theirs, server.url) as target:
        target.connect("p", timeout_s=10)
        traffic = _traffic()
        for endpoint, known in ((source, target), (target, source)):
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.connect(endpoint._lines.address)
                for _ in range(COUNT):
                    dealer.send(_addressed(broken(rng, traffic, MSGPACK), known, endpoint))
                dealer.linger = 2000
        tokens = {"attn": Wanted((0, 8))}
        sending = source.send("wanted", tokens, table([0, 1]), timeout_s=20)
        receiving = target.receive("wanted", "p", tokens, table([2, 5]), timeout_s=20)
        target.wait(receiving)
        source.wait(sending)
        assert np.array_equal(theirs.memory, theirs.expected([2, 5], 0, (0, 8)))
        assert source.stats()["refused_messages"] > 0 and target.stats()["refused_messages"] > 0


def _addressed(data: bytes, sender: Endpoint, recipient: Endpoint) -> bytes:
    """As if the known peer had said it, where it decodes. Not its goodbye: what follows would be a stranger's."""
    try:
        body = messages.decode(data).body
    except KVFerryError:
        return data
    if isinstance(body, (messages.Hello, messages.Welcome, messages.Goodbye)):
        return data
    return messages.encode(sender._me, recipient._me, body)


def _open(name: str, pool: WorkerPool, registry: str) -> Endpoint:
    document = instance(name, pool.shape, (pool.worker(),))
    return Endpoint(document, 0, HostMemory([map_array(pool.bytes_view)]), world=1, registry=registry)


def test_the_tcp_port_goes_on(uncaught: list[object]) -> None:
    rng = random.Random(SEED)
    with RegistryServer() as server:
        document = WorkerPool(Shape(), 0)
        memory = HostMemory([map_array(document.bytes_view)])
        whole = instance("d", Shape(), (document.worker(),))
        with Endpoint(whole, 0, memory, world=1, registry=server.url, transport="tcp") as endpoint:
            receiver = endpoint._transport._receiver  # type: ignore[attr-defined]
            key = endpoint._staging.key
            hello = _frame(0, key)
            for _ in range(COUNT):
                say((receiver.card.host, receiver.card.port), broken(rng, [hello + _frame(1, key), hello], None))
            with socket.create_connection((receiver.card.host, receiver.card.port), timeout=5) as connection:
                connection.sendall(hello)
                assert connection.recv(7)[4] == 1


def _frame(kind: int, key: bytes) -> bytes:
    from kvferry.transport import tcp

    return tcp.HEADER.pack(tcp.FRAME_MAGIC, tcp.VERSION, kind, len(key), 1 << 40, 0, key)
