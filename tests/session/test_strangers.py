"""What somebody without the deployment's keys gets from control sockets, registry and data port: nothing, and it is
said. Each stranger stands beside one who has the keys and is heard, so that a test of deaf sockets can't pass.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.errors import RegistryError, TransferRefused, TransferTimeout
from kvferry.layout.document import decode_msgpack
from kvferry.layout.request import Wanted
from kvferry.session import registry
from kvferry.session.endpoint import Endpoint
from kvferry.session.events import Received
from kvferry.session.keys import Keys
from kvferry.session.messages import Abort, Body, ChunkDone, Goodbye, Grants, Hello, Peer, encode
from kvferry.session.registry import Entry, Registry, RegistryServer
from kvferry.session.signing import Signer
from kvferry.transport.base import Export
from kvferry.transport.tcp import FRAME_MAGIC, HEADER, HELLO, VERSION, WRITE
from tests.session.crew import Crew, Pair, open_all
from tests.session.deployment import deployment, endpoint, only_itself
from tests.session.pools import Shape, table
from tests.session.sim import Sim
from tests.session.test_endpoint import cross
from tests.session.test_failures import until
from tests.transport.installed import TRANSPORTS

ONE, TWO, THREE = deployment("one", "two", "three")
(STRANGER,) = deployment("stranger")
WANTED_S = 10.0


@pytest.fixture
def keyed() -> Iterator[str]:
    with RegistryServer(keys=ONE) as server:
        yield server.url


@contextmanager
def raw_line(to: Endpoint, keys: Keys | None, server_key: str = "") -> Iterator[zmq.Socket[bytes]]:
    """A bare ZeroMQ client of an endpoint's control socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        if keys:
            dealer.setsockopt_string(zmq.CURVE_SERVERKEY, server_key or to._at.keys.public)  # type: ignore[union-attr]
            dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            dealer.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        dealer.connect(to._lines.address)
        yield dealer


def says(to: Endpoint, sender: Peer, body: Body) -> bytes:
    return encode(sender, to._me, body)  # type: ignore[arg-type]


def heard(to: Endpoint) -> int:
    return to.stats()["peers"] + to.stats()["refused_messages"]


# control sockets


@pytest.mark.parametrize(
    ("keys", "server_key"),
    [(None, ""), (STRANGER, ""), (only_itself(THREE), STRANGER.public)],
    ids=["no keys", "key not allowed", "wrong key of the server"],
)
def test_a_stranger_is_not_heard_and_hears_nothing(keys: Keys | None, server_key: str, keyed: str) -> None:
    with endpoint("p", keyed, ONE) as target, endpoint("d", keyed, TWO) as other:
        hello = says(target, other._me, Hello(other._machine.core.card))
        with raw_line(target, keys, server_key) as line:
            for message in (b"junk", hello):
                line.send(message)
            assert not line.poll(1000), "not even a refusal to learn from"
        assert heard(target) == 0
        with raw_line(target, TWO) as line:
            line.send(b"junk")
            line.send(hello)
            until(lambda: heard(target) == 2)
        other.connect("p", timeout_s=WANTED_S)


def test_f67_a_member_cannot_speak_for_another(keyed: str) -> None:
    """The message is right to the byte, the generation is known and the key is allowed, but it is another's."""
    with endpoint("p", keyed, ONE) as source, endpoint("d", keyed, TWO) as target:
        target.connect("p", timeout_s=WANTED_S)
        goodbye = says(target, source._me, Goodbye())
        forged = says(target, Peer("forged", 1, 0), Hello(source._machine.core.card))
        for message in (goodbye, forged):
            with raw_line(target, THREE) as line:
                line.send(message)
                count = target.stats()["refused_messages"]
                until(lambda count=count: target.stats()["refused_messages"] == count + 1)  # type: ignore[misc]
        assert target.stats()["refused: said with another key than its sender's"] == 2
        assert target.stats()["peers"] == 1
        with raw_line(target, ONE) as line:
            line.send(goodbye)
            until(lambda: target.stats()["peers"] == 0)


def test_f67_who_came_first_under_a_name_with_another_key_is_not_who_the_registry_knows(keyed: str) -> None:
    with endpoint("p", keyed, ONE) as source, endpoint("d", keyed, TWO) as target:
        until(lambda: Registry(keyed, keys=ONE).instance("p").ready)
        lie = msgspec.structs.replace(source._machine.core.card, key=THREE.public)
        with raw_line(target, THREE) as line:
            line.send(says(target, source._me, Hello(lie)))
            until(lambda: target.stats()["peers"] == 1)
        with pytest.raises(TransferRefused, match=f"the registry names the public key '{re.escape(ONE.public)}'"):
            target.connect("p", timeout_s=WANTED_S)


def test_old_generations_are_refused_with_keys_too(keyed: str) -> None:
    with endpoint("p", keyed, ONE) as source, endpoint("d", keyed, TWO) as target:
        target.connect("p", timeout_s=WANTED_S)
        older = replace_peer(target._me, generation=target._me.generation - 1)
        with raw_line(target, ONE) as line:
            line.send(encode(source._me, older, Goodbye()))
            until(lambda: target.stats().get("refused: message for another worker or an earlier start") == 1)
        assert target.stats()["peers"] == 1


def replace_peer(peer: Peer, **change: int) -> Peer:
    return msgspec.structs.replace(peer, **change)


# grants


def test_f68_grants_and_reports_are_good_once_and_for_their_peer_only() -> None:
    """Between allowed members, while the transfers run and when they have ended."""
    sim = Sim(random.Random(0), {"p": Shape(), "d": Shape(), "e": Shape()})
    (source,), (d,), (e,) = (sim.peers(name) for name in "pde")
    said: list[tuple[Peer, Peer, Any]] = []
    honest = sim.act

    def act(peer: Peer, actions: list[Any]) -> None:
        said.extend((peer, a.peer, a.body) for a in actions if isinstance(getattr(a, "body", None), Body))
        honest(peer, actions)

    def of(kind: type[Body], sender: Peer, to: Peer) -> list[Any]:
        return [body for one, other, body in said if isinstance(body, kind) and (one, other) == (sender, to)]

    def refused(by: Peer, sender: Peer, body: Any) -> bool:
        before = sim.machines[by].stats()["refused_messages"]
        actions = sim.machines[by].handle(Received(sender, by, body), sim.now)
        return sim.machines[by].stats()["refused_messages"] == before + 1 and not [
            a for a in actions if type(a).__name__ in ("Write", "Scatter", "Ended")
        ]

    sim.act = act  # type: ignore[method-assign]
    for peer, call in [*sim.start("a", "p", "d"), *sim.start("b", "p", "e")]:
        sim.event(peer, call)
    while not (of(Grants, d, source) and of(Grants, e, source)):
        assert sim.step()
    (fresh, *_), (theirs, *_) = of(Grants, d, source), of(Grants, e, source)
    assert refused(source, e, msgspec.structs.replace(theirs, transfer="a")), "a grant by a target of another transfer"
    while not (living := sim.machines[e].targets.running["b"].flows[source].granted):
        assert sim.step()
    piece, lease = next(iter(living.items()))
    lie = ChunkDone("b", 1, piece, fresh.grants[0].grant, lease.nbytes)
    assert refused(e, source, lie), "a report with the grant of another target's slot"
    while not of(ChunkDone, source, d):
        assert sim.step()
    (report, *_) = of(ChunkDone, source, d)
    for _ in ("running", "ended"):
        assert refused(source, d, fresh), "a replayed grant writes nothing"
        assert refused(d, e, report), "a report by somebody who was never granted anything"
        sim.settle()
        assert refused(d, source, report), "a replayed report"
    assert [ended.error for _, ended, _ in sim.ended] == [None] * 4
    assert all(len(done) == len(set(done)) for done in sim.scattered.values())


def test_a_transfer_id_alone_gives_nothing(keyed: str) -> None:
    """A member that knows the id, but is neither source nor target of it, can't end or feed the transfer."""
    with endpoint("p", keyed, ONE) as source, endpoint("d", keyed, TWO) as target, endpoint("x", keyed, THREE) as other:
        target.connect("p", timeout_s=WANTED_S)
        other.connect("d", timeout_s=WANTED_S)
        other.connect("p", timeout_s=WANTED_S)
        transfer = target.receive("t", "p", {"attn": Wanted((0, 4))}, table([0]), timeout_s=WANTED_S)
        until(lambda: source.stats()["offers_waiting"] == 1)
        for side, role in ((target, "target"), (source, "source")):
            with raw_line(side, THREE) as line:
                line.send(says(side, other._me, Abort("t", 1, role, "aborted", "mischief")))  # type: ignore[arg-type]
                line.send(says(side, other._me, ChunkDone("t", 1, 0, b"g" * 16, 5)))
                until(lambda side=side: side.stats()["refused_messages"] >= 1)  # type: ignore[misc]
        sent = source.send("t", {"attn": Wanted((0, 4))}, table([0]), timeout_s=WANTED_S)
        target.wait(transfer)
        source.wait(sent)


# the registry


def request(url: str, method: str, path: str, body: bytes = b"", authorization: str = "") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    headers = {"Authorization": authorization} if authorization else {}
    connection.request(method, path, body or None, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data)


def entry(keys: Keys, generation: int = 1, port: int = 9000) -> Entry:
    return Entry("p", generation, 0, 1, f"tcp://127.0.0.1:{port}", keys.public)


def put_body(what: Entry) -> bytes:
    return msgspec.json.encode({"entry": what, "ttl_s": 60})


PATH = "/v1/instances/p"


def test_f67_an_http_client_without_keys_learns_and_changes_nothing(keyed: str) -> None:
    Registry(keyed, keys=ONE).put(entry(ONE), 60)
    for method, path, body in [
        ("GET", PATH, b""),
        ("GET", "/v1/other", b""),
        ("PUT", PATH, put_body(entry(ONE, 2, 666))),
        ("PUT", PATH, b"junk"),
        ("DELETE", PATH + "/0/1", b""),
    ]:
        status, answer = request(keyed, method, path, body)
        assert (status, list(answer)) == (401, ["error"])
        assert "this registry has keys and the request none" in answer["error"]
    assert Registry(keyed, keys=TWO).instance("p").workers == (entry(ONE),)


def test_f67_a_recorded_request_cannot_be_sent_again(keyed: str) -> None:
    """An old PUT would bring a dead worker back, an old DELETE would sign a living one off."""

    def signed(method: str, path: str, body: bytes = b"") -> str:
        challenge = request(keyed, "GET", "/v1/challenge")[1]["challenge"]
        return Signer(ONE.registry, challenge).header(method, path, body)

    body = put_body(entry(ONE))
    put = signed("PUT", PATH, body)
    assert request(keyed, "PUT", PATH, body, put)[0] == 200
    delete = signed("DELETE", PATH + "/0/1")
    assert request(keyed, "DELETE", PATH + "/0/1", b"", delete)[0] == 200
    status, answer = request(keyed, "PUT", PATH, body, put)
    assert (status, "used before" in answer["error"]) == (401, True)
    assert not Registry(keyed, keys=ONE).instance("p").ready
    Registry(keyed, keys=ONE).put(entry(ONE), 60)
    assert request(keyed, "DELETE", PATH + "/0/1", b"", delete)[0] == 401
    fresh = signed("PUT", PATH, body)
    assert request(keyed, "PUT", PATH, put_body(entry(ONE, 2, 666)), fresh)[0] == 401, "another body"
    assert Registry(keyed, keys=ONE).instance("p").workers == (entry(ONE),)


def test_a_restarted_registry_takes_no_request_of_the_earlier_start() -> None:
    with RegistryServer(keys=ONE) as server:
        challenge = request(server.url, "GET", "/v1/challenge")[1]["challenge"]
        port = int(server.url.rpartition(":")[2])
    body = put_body(entry(ONE))
    with RegistryServer(port=port, keys=ONE) as server:
        status, answer = request(
            server.url, "PUT", PATH, body, Signer(ONE.registry, challenge).header("PUT", PATH, body)
        )
        assert (status, "current start" in answer["error"]) == (401, True)


def test_another_deployments_keys_are_refused_and_said(keyed: str) -> None:
    foreign = replace(STRANGER, registry=b"x" * 32)
    with pytest.raises(RegistryError, match=r"401: .*signed with other keys than this registry's"):
        Registry(keyed, keys=foreign).put(entry(STRANGER), 60)
    with pytest.raises(RegistryError, match=r"409: .*its public key .* is not allowed here"):
        Registry(keyed, keys=STRANGER).put(entry(STRANGER), 60)
    with pytest.raises(RegistryError, match=r"409: .*its public key '' is not allowed here"):
        Registry(keyed, keys=ONE).put(replace_entry(entry(ONE), key=""), 60)


def replace_entry(what: Entry, **change: str) -> Entry:
    return msgspec.structs.replace(what, **change)


def test_keys_on_one_side_only_are_said_by_the_client_too(keyed: str) -> None:
    with pytest.raises(RegistryError, match=r"401: .*this registry has keys and the request none; set KVFERRY_KEYS"):
        Registry(keyed).instance("p")
    with (
        RegistryServer() as bare,
        pytest.raises(RegistryError, match="has no keys and this side has; set KVFERRY_KEYS"),
    ):
        Registry(bare.url, keys=ONE).instance("p")
    with RegistryServer() as bare, pytest.raises(RegistryError, match=r"it has keys .* and this registry has none"):
        Registry(bare.url).put(entry(ONE), 60)


def test_a_false_registry_is_not_believed() -> None:
    """It hands out challenges and entries as a real one does, but can't sign them."""

    class False_(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            entries = {"workers": [msgspec.to_builtins(entry(ONE, 9, 666))], "missing": ""}
            body = json.dumps({"challenge": "00" * 56} if "challenge" in self.path else entries).encode()
            self.send_response(200)
            self.send_header("X-KVFerry-Signature", "00" * 32)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with socketserver.TCPServer(("127.0.0.1", 0), False_) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            with pytest.raises(RegistryError, match="its answer is not signed with this deployment's keys"):
                Registry(url, keys=ONE).instance("p")
            assert Registry(url).instance("p").ready, "without keys anybody is believed, on loopback"
        finally:
            server.shutdown()
            thread.join()


def test_silent_connections_do_not_keep_members_out(keyed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More strangers than the registry has threads for: those over the limit are hung up on, and places return."""
    monkeypatch.setattr(registry, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(registry._Handler, "timeout", 0.5)
    with RegistryServer(keys=ONE) as server:
        host, port = server.url.removeprefix("http://").split(":")
        before = threading.active_count()
        strangers = [socket.create_connection((host, int(port))) for _ in range(40)]
        try:
            time.sleep(0.2)
            assert threading.active_count() <= before + 4

            def served() -> bool:
                try:
                    return not Registry(server.url, keys=ONE).instance("p").ready
                except RegistryError:
                    return False

            until(served)
        finally:
            for stranger in strangers:
                stranger.close()


# keys on one side only


def ends(transfer: Any, of: Endpoint) -> Exception:
    started_s = time.monotonic()
    with pytest.raises((TransferTimeout, TransferRefused)) as caught:
        of.wait(transfer)
    assert time.monotonic() - started_s < 5
    return caught.value


@pytest.mark.parametrize("with_keys", ["registry", "source", "target", "registry and source", "registry and target"])
def test_keys_on_one_side_only_end_in_typed_errors_that_say_so(with_keys: str) -> None:
    def keys(of: str, which: Keys) -> Keys | None:
        return which if of in with_keys else None

    with (
        RegistryServer(keys=keys("registry", ONE)) as known,
        endpoint("p", known.url, keys("source", ONE)) as source,
        endpoint("d", known.url, keys("target", TWO)) as target,
    ):
        sent = source.send("t", {}, table([0]), timeout_s=2)
        received = target.receive("t", "p", {}, table([0]), timeout_s=2)
        errors = [str(ends(received, target)), str(ends(sent, source))]
    assert "KVFERRY_KEYS" in errors[0] or "misses rank" in errors[0] or "has no registered worker" in errors[0]
    assert any("set KVFERRY_KEYS" in error for error in errors), errors
    for side, error in (("target", errors[0]), ("source", errors[1])):
        if (side in with_keys) != ("registry" in with_keys):
            assert "KVFERRY_KEYS" in error, (side, error)


@pytest.mark.parametrize("with_keys", ["source", "target"])
def test_each_side_with_a_registry_of_its_own(with_keys: str) -> None:
    source_keys, target_keys = (ONE, None) if with_keys == "source" else (None, TWO)
    with (
        RegistryServer(keys=source_keys) as theirs,
        RegistryServer(keys=target_keys) as ours,
        endpoint("p", theirs.url, source_keys),
        endpoint("d", ours.url, target_keys) as target,
    ):
        received = target.receive("t", "p", {}, table([0]), timeout_s=2, registry=theirs.url)
        assert "set KVFERRY_KEYS" in str(ends(received, target))


def test_a_source_whose_key_is_not_allowed_is_refused_at_once(keyed: str) -> None:
    with endpoint("p", keyed, ONE), endpoint("d", keyed, only_itself(TWO)) as target:
        with pytest.raises(TransferRefused, match=f"the peer's public key {re.escape(ONE.public)} is not allowed here"):
            target.connect("p", timeout_s=WANTED_S)


def test_a_target_whose_key_is_not_allowed_hears_it_from_the_socket(keyed: str) -> None:
    started_s = time.monotonic()
    with endpoint("p", keyed, only_itself(ONE)) as source, endpoint("d", keyed, TWO) as target:
        with pytest.raises(TransferRefused, match="it does not allow this side's public key"):
            target.connect("p", timeout_s=WANTED_S)
        assert heard(source) == 0
    assert time.monotonic() - started_s < WANTED_S / 2, "not by waiting for the deadline"


@pytest.mark.parametrize("keys", [None, ONE], ids=["no keys", "keys"])
def test_a_socket_of_the_other_kind_is_refused_at_once(keys: Keys | None) -> None:
    """The registry's entry says one thing, the socket is another: whoever took that port, nothing is said to it."""
    other = TWO if keys is None else None
    with RegistryServer(keys=keys) as registry, RegistryServer(keys=other) as elsewhere:
        with endpoint("p", elsewhere.url, other) as source, endpoint("d", registry.url, keys) as target:
            stale = Entry("p", 1, 0, 1, source._lines.address, TWO.public if keys else "")
            Registry(registry.url, keys=keys).put(stale, 60)
            with pytest.raises(TransferRefused, match="one has keys and the other has none"):
                target.connect("p", timeout_s=WANTED_S)
            assert heard(source) == 0


# with keys everything works


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_transfers_with_keys_between_processes(transport: str, crew: Crew, keyed: str) -> None:
    sources, targets = (lambda members: (members[:2], members[2:]))(crew.take(3))
    shape = Shape(tp=2, order="hnd")
    options: dict[str, Any] = {"slots": 4, "slot_bytes": 1024, "transport": transport}
    open_all(sources, "keyed-p", shape, keyed, keys=ONE, host="127.0.0.2", **options)
    open_all(targets, "keyed-d", Shape(page_tokens=6), keyed, keys=TWO, **options)
    pair = Pair("keyed-p", "keyed-d", sources, targets, shape, Shape(page_tokens=6))
    for turn in range(3):
        cross(pair, (0, 21), f"t{turn}")
    assert sources[0]("address").startswith("tcp://127.0.0.2:")
    (link,) = sources[0]("links").values()
    assert link.startswith("shm" if transport == "auto" else transport)


def test_a_worker_killed_and_restarted_with_keys_is_found_again(crew: Crew, keyed: str) -> None:
    for start in range(2):
        source, target = crew.take(2)
        open_all([source], "p-again", Shape(), keyed, keys=ONE)
        open_all([target], f"d-again-{start}", Shape(), keyed, keys=TWO)
        target("connect", "p-again", WANTED_S)
        if start == 0:
            source.kill()


def test_f67_a_data_port_is_of_no_use_without_the_export_and_a_grant(keyed: str) -> None:
    """The tcp port of a target, seen from a stranger: no write, no read, and other connections go on."""
    with endpoint("d", keyed, ONE, transport="tcp") as target:
        export = decode_msgpack(target._transport.export(), Export)
        assert export.tcp is not None
        before = target._staging.memory.tobytes()
        base = target._staging.address(0).value
        write = HEADER.pack(FRAME_MAGIC, VERSION, WRITE, 16, base, 4, b"g" * 16) + b"evil"
        hello = HEADER.pack(FRAME_MAGIC, VERSION, HELLO, 16, 0, 0, export.key)
        wrong = HEADER.pack(FRAME_MAGIC, VERSION, HELLO, 16, 0, 0, b"k" * 16)
        for sent, words in [
            (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"not a frame"),
            (write, b"no hello"),
            (wrong + write, b"no hello"),
            (hello + write, b"unknown or revoked grant"),
        ]:
            with socket.create_connection((export.tcp.host, export.tcp.port), timeout=5) as stranger:
                stranger.sendall(sent)
                assert words in drain(stranger)
        assert target._staging.memory.tobytes() == before


def drain(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(4096):
        data += piece
    return data


# nothing is left behind


def test_lines_with_keys_leave_no_descriptor_and_no_thread(keyed: str) -> None:
    """Handshakes that succeed, that are refused, and strangers who go away in the middle."""

    def turn(number: int, stays: Endpoint) -> None:
        with (
            endpoint(f"comes-{number}", keyed, ONE) as comes,
            endpoint(f"bars-{number}", keyed, only_itself(ONE)) as bars,
        ):
            stays.connect(f"comes-{number}", timeout_s=WANTED_S)
            with pytest.raises(TransferRefused):
                stays.connect(f"bars-{number}", timeout_s=WANTED_S)
            with raw_line(comes, STRANGER) as line, socket.create_connection(at(bars)):
                line.send(b"junk")
                time.sleep(0.05)

    def count(stays: Endpoint) -> tuple[int, int]:
        until(lambda: stays.stats()["peers"] == 0)
        time.sleep(0.3)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with endpoint("stays", keyed, TWO) as stays:
        counts = []
        for number in range(6):
            turn(number, stays)
            counts.append(count(stays))
        assert not stays._lines._monitors
    assert counts[-1][0] <= counts[1][0] + 1 and counts[-1][1] <= counts[1][1], counts


def at(of: Endpoint) -> tuple[str, int]:
    host, port = of._lines.address.removeprefix("tcp://").split(":")
    return host, int(port)


def test_an_endpoint_with_keys_and_strangers_at_the_door_leaves_the_core_alone(keyed: str) -> None:
    with endpoint("p", keyed, ONE) as target, raw_line(target, STRANGER) as one, raw_line(target, None) as two:
        one.send(b"junk")
        two.send(b"junk")
        time.sleep(1.0)
        began_s = time.process_time()
        time.sleep(2.0)
        assert time.process_time() - began_s < 0.06
