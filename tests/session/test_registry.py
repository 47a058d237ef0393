"""The embedded registry and its client."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.errors import KeysError, RegistryError
from kvferry.session.events import Found, NotFound
from kvferry.session.meeting import KINDS, Meeting
from kvferry.session.registry import Directory, Entry, Listed, Registry, RegistryServer, View
from kvferry.session.shell import Rendezvous
from tests.session.deployment import endpoint
from tests.session.sim import TABLES as TABLES_OF
from tests.session.sim import TOKENS


def entry(rank: int, world: int = 2, generation: int = 1, instance: str = "p") -> Entry:
    return Entry(instance, generation, rank, world, f"tcp://127.0.0.1:{9000 + rank}")


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


def test_f62_ready_only_when_every_rank_is_there() -> None:
    directory = Directory()
    directory.put(entry(0), 10, 0)
    directory.put(entry(0, generation=2), 10, 0)
    view = directory.view("p", 0)
    assert not view.ready
    assert view.missing == "instance 'p' misses rank(s) 1 of 2"
    directory.put(entry(1), 10, 0)
    assert directory.view("p", 0).ready
    assert [e.generation for e in directory.view("p", 0).workers] == [2, 1]


def test_an_entry_expires_unless_it_is_renewed() -> None:
    directory = Directory()
    directory.put(entry(0, 1), 5, now=0)
    directory.put(entry(0, 1), 5, now=4)
    assert directory.view("p", 8.9).ready
    assert directory.view("p", 9.0).missing == "instance 'p' has no registered worker"


def test_an_earlier_start_cannot_replace_a_later_one() -> None:
    directory = Directory()
    directory.put(entry(0, 1, generation=5), 10, 0)
    with pytest.raises(RegistryError, match="generation 4 is superseded by 5"):
        directory.put(entry(0, 1, generation=4), 10, 0)
    directory.delete("p", 0, 4)
    assert directory.view("p", 0).ready, "the earlier start can't sign the later one off either"
    directory.delete("p", 0, 5)
    assert not directory.view("p", 0).ready


def test_a_restart_with_another_world_counts_alone() -> None:
    directory = Directory()
    for rank in range(4):
        directory.put(entry(rank, 4, generation=1), 100, 0)
    directory.put(entry(0, 2, generation=2), 100, 0)
    assert directory.view("p", 0).missing == "instance 'p' misses rank(s) 1 of 2"
    directory.put(entry(1, 2, generation=2), 100, 0)
    assert [e.rank for e in directory.view("p", 0).workers] == [0, 1]


def test_the_listing_tells_ages_and_who_was_superseded() -> None:
    directory = Directory()
    directory.put(entry(0, 1, generation=5), 10, now=0)
    directory.put(entry(0, 1, generation=5, instance="a"), 30, now=1)
    with pytest.raises(RegistryError, match="superseded by 5"):
        directory.put(entry(0, 1, generation=4), 10, now=2)
    directory.put(entry(0, 1, generation=5), 10, now=3)
    listed = [(one.entry.instance, one.age_s, one.ttl_s, one.superseded) for one in directory.listing(now=4)]
    assert listed == [("a", 3, 30, 0), ("p", 1, 10, 4)]
    assert [one.superseded for one in directory.listing(now=12.5)] == [0, 0]  # nobody has tried since
    assert [one.entry.instance for one in directory.listing(now=20)] == ["a"]


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(RegistryError, match="rank 2 is outside its world of 2"):
        Directory().put(entry(2), 10, 0)


def test_over_http(server: RegistryServer) -> None:
    client = Registry(server.url)
    name = "team a/prefill 0 ü?"
    client.put(entry(0, 1, instance=name), 10)
    assert client.instance(name).workers == (entry(0, 1, instance=name),)
    assert [one.entry for one in client.listing()] == [entry(0, 1, instance=name)]
    assert client.instance("nobody").missing == "instance 'nobody' has no registered worker"
    client.delete(entry(0, 1, instance=name))
    assert not client.instance(name).ready
    with pytest.raises(RegistryError, match=r"409.*outside its world"):
        client.put(entry(3), 10)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/v1/instances/p", b"not json", 400),
        ("PUT", "/v1/instances/p", b'{"entry": {}, "ttl_s": 1}', 400),
        ("PUT", "/v1/instances/p", b"x" * (65 << 10), 413),
        ("GET", "/v1/other", None, 404),
        ("DELETE", "/v1/instances/p/x/1", None, 404),
        ("POST", "/v1/instances/p", b"", 501),
    ],
)
def test_junk_is_answered_and_stops_nothing(
    server: RegistryServer, method: str, path: str, body: bytes | None, status: int
) -> None:
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=5)
    connection.request(method, path, body)
    assert connection.getresponse().status == status
    connection.close()
    Registry(server.url).put(entry(0, 1), 10)
    assert Registry(server.url).instance("p").ready


def test_unreachable_and_nonsense_registries_are_typed_errors() -> None:
    with RegistryServer() as server:
        url = server.url
    with pytest.raises(RegistryError, match=url):
        Registry(url).instance("p")


@pytest.mark.parametrize("url", ["127.0.0.1:7000", "http://127.0.0.1", "http://[", "http://h:99999", "file:///x"])
def test_what_is_no_url_of_a_registry_is_said(url: str) -> None:
    with pytest.raises(RegistryError, match="expected a URL such as"):
        Registry(url)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_f69_only_loopback_is_bound(host: str) -> None:
    with pytest.raises(KeysError, match=r"only loopback.*kvferry keys"):
        RegistryServer(host)


def test_f61_asks_until_ready_and_refills_a_restarted_registry() -> None:
    found: list[Found | NotFound] = []
    ready = threading.Event()

    def post(event: Found | NotFound) -> None:
        found.append(event)
        if isinstance(event, Found):
            ready.set()

    with RegistryServer() as server:
        port = int(server.url.rpartition(":")[2])
        rendezvous = Rendezvous(Registry(server.url), entry(0), 0.3, post)
        rendezvous.lookup("p", time.monotonic() + 20)
        assert not ready.wait(0.2)
        assert isinstance(found[-1], NotFound)
        assert found[-1].problem == "instance 'p' misses rank(s) 1 of 2"
    with RegistryServer(port=port) as server:
        Registry(server.url).put(entry(1), 10)
        assert ready.wait(10), "the renewal refills the restarted registry, and the failure was not kept"
        rendezvous.close()
        assert Registry(server.url).instance("p").missing == "instance 'p' misses rank(s) 0 of 2"


class Table:
    """A registry in this process's memory: as much as an endpoint needs of one."""

    host = "127.0.0.1"

    def __init__(self, url: str) -> None:
        self.url, self.directory = url, TABLES.setdefault(url, Directory())

    def at(self, url: str) -> Meeting:
        return Table(url)

    def put(self, entry: Entry, ttl_s: float) -> None:
        self.directory.put(entry, ttl_s, time.monotonic())

    def delete(self, entry: Entry) -> None:
        self.directory.delete(entry.instance, entry.rank, entry.generation)

    def instance(self, name: str) -> View:
        return self.directory.view(name, time.monotonic())

    def listing(self) -> tuple[Listed, ...]:
        raise RegistryError("no transfer needs it")


TABLES: dict[str, Directory] = {}


def test_another_registry_can_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two endpoints meet and move bytes with nothing but what `Meeting` says."""
    monkeypatch.setitem(KINDS, "table", lambda url, keys: Table(url))
    with endpoint("p", "table://one", None) as source, endpoint("d", "table://one", None) as target:
        sent = source.send("t", TOKENS, TABLES_OF, timeout_s=20)
        received = target.receive("t", "p", TOKENS, TABLES_OF, timeout_s=20)
        assert target.wait(received).bytes == source.wait(sent).bytes > 0
        assert TABLES["table://one"].view("d", time.monotonic()).ready
    assert not TABLES["table://one"].view("d", time.monotonic()).ready


def test_a_registry_that_never_answers_delays_no_other_and_no_renewal() -> None:
    found: list[Found | NotFound] = []
    ready = threading.Event()

    def post(event: Found | NotFound) -> None:
        found.append(event)
        if isinstance(event, Found):
            ready.set()

    with RegistryServer() as own, RegistryServer() as other, socket.create_server(("127.0.0.1", 0)) as silent:
        Registry(other.url).put(entry(0), 60)
        Registry(other.url).put(entry(1), 60)
        rendezvous = Rendezvous(Registry(own.url), entry(0), 0.5, post)
        started = time.monotonic()
        rendezvous.lookup("p", started + 5, f"http://127.0.0.1:{silent.getsockname()[1]}")
        rendezvous.lookup("p", started + 5, other.url)
        assert ready.wait(1.5)
        (event,) = [event for event in found if isinstance(event, Found)]
        assert (event.registry, [e.rank for e in event.entries]) == (other.url, [0, 1])
        time.sleep(1.0)
        assert [e.rank for e in Registry(own.url).instance("p").workers] == [0]
        rendezvous.close()
    assert _threads_end("kvferry-lookup"), "a lookup ends with its rendezvous"


def _threads_end(name: str) -> bool:
    deadline = time.monotonic() + 10
    while any(thread.name == name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(thread.name == name for thread in threading.enumerate())
