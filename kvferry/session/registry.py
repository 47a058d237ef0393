"""Rendezvous: where the workers of an instance are. Entries expire unless they are renewed.

A restarted registry is empty and is refilled by the workers' renewals. An instance is ready when every rank
0 … world-1 is there. With keys, registry and clients prove to each other that they hold them, see `signing`.
"""

from __future__ import annotations

import http.client
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from kvferry.errors import DocumentError, RegistryError
from kvferry.layout.document import Struct, decode_json, encode_json
from kvferry.session.keys import LOOPBACK, Access, Keys, access
from kvferry.session.messages import PROTOCOL
from kvferry.session.reach import registration_problem
from kvferry.session.signing import ANSWER_HEADER, CHALLENGE_PATH, Challenges, Signer, Unsigned, answer_mac

MAX_BODY_BYTES = 64 << 10
MAX_ENTRIES = 65_536
MAX_CONNECTIONS = 512
_PREFIX = "/v1/instances/"


class Entry(Struct, frozen=True):
    """One worker. A larger generation is a later start of the same rank. `key`: its public key, if it has keys.

    `draining`: it ends what runs and takes nothing new.
    """

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    generation: Annotated[int, msgspec.Meta(ge=0)]
    rank: Annotated[int, msgspec.Meta(ge=0)]
    world: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""
    protocol: int = PROTOCOL
    draining: bool = False


class _Put(Struct, frozen=True):
    entry: Entry
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class View(Struct, frozen=True):
    """What the registry knows of an instance: living workers by rank, and what is missing, empty when it is ready."""

    workers: tuple[Entry, ...]
    missing: str

    @property
    def ready(self) -> bool:
        return not self.missing


class Listed(Struct, frozen=True):
    """An entry as the registry keeps it: `age_s` since its last renewal, of `ttl_s` until it expires.

    `superseded`: the generation of an earlier start of this rank that still tries to register, 0 where there is none.
    """

    entry: Entry
    ttl_s: float
    age_s: float
    superseded: int = 0


@dataclass
class _Kept:
    entry: Entry
    ttl_s: float
    renewed_s: float
    refused: tuple[int, float] = (0, 0.0)  # the generation of an earlier start, and until when that is worth a word

    @property
    def end_s(self) -> float:
        return self.renewed_s + self.ttl_s


class Directory:
    """The registry's state: entries by (instance, rank), so the same rank twice counts once. Time is passed in."""

    def __init__(self, at: Access | None = None) -> None:
        """`at`: where the registry listens, and with which keys."""
        at = at or Access(LOOPBACK)
        self._host, self._allowed = at.host, at.keys.allowed if at.keys else frozenset()
        self._entries: dict[tuple[str, int], _Kept] = {}

    def put(self, entry: Entry, ttl_s: float, now: float) -> None:
        """RegistryError where a later start of this rank, or one with another key, is alive, the rank is outside its
        world, its address can't be reached by others, or its key is not allowed.
        """
        if entry.rank >= entry.world:
            raise RegistryError(f"instance {entry.instance!r}: rank {entry.rank} is outside its world of {entry.world}")
        problem = registration_problem(self._host, self._allowed, entry.address, entry.key)
        if problem:
            raise RegistryError(f"instance {entry.instance!r} rank {entry.rank}: {problem}")
        self._expire(now)
        old = self._entries.get((entry.instance, entry.rank))
        if old is not None and old.entry.key != entry.key:
            raise RegistryError(
                f"instance {entry.instance!r} rank {entry.rank}: is registered with the public key {old.entry.key!r}, "
                f"which {entry.key!r} can't replace while that entry is renewed, or for another {old.end_s - now:.0f} s"
            )
        if old is not None and old.entry.generation > entry.generation:
            newer = old.entry.generation
            old.refused = entry.generation, now + ttl_s
            raise RegistryError(
                f"instance {entry.instance!r} rank {entry.rank}: generation {entry.generation} is superseded by {newer}"
            )
        if old is None and len(self._entries) >= MAX_ENTRIES:
            raise RegistryError(f"the registry is full with {MAX_ENTRIES} entries")
        refused = old.refused if old is not None else (0, 0.0)
        self._entries[entry.instance, entry.rank] = _Kept(entry, ttl_s, now, refused)

    def delete(self, instance: str, rank: int, generation: int) -> None:
        old = self._entries.get((instance, rank))
        if old is not None and old.entry.generation == generation:
            del self._entries[instance, rank]

    def view(self, instance: str, now: float) -> View:
        self._expire(now)
        kept = (kept.entry for kept in self._entries.values())
        found = sorted((entry for entry in kept if entry.instance == instance), key=lambda entry: entry.rank)
        if not found:
            return View((), f"instance {instance!r} has no registered worker")
        # after a restart with another world, what is left of the old one has to go unnoticed
        world = max(found, key=lambda entry: entry.generation).world
        found = [entry for entry in found if entry.world == world]
        absent = sorted(set(range(world)) - {entry.rank for entry in found})
        ranks = ", ".join(map(str, absent[:8]))
        return View(tuple(found), f"instance {instance!r} misses rank(s) {ranks} of {world}" if absent else "")

    def listing(self, now: float) -> tuple[Listed, ...]:
        """Every entry, by instance and rank."""
        self._expire(now)
        kept = [self._entries[key] for key in sorted(self._entries)]
        return tuple(
            Listed(k.entry, k.ttl_s, now - k.renewed_s, k.refused[0] if now < k.refused[1] else 0) for k in kept
        )

    def _expire(self, now: float) -> None:
        for key in [key for key, kept in self._entries.items() if kept.end_s <= now]:
            del self._entries[key]


class RegistryServer:
    """An embedded registry. Use as a context manager or call `close`.

    `host` and `keys`: from KVFERRY_HOST and KVFERRY_KEYS where they aren't given; without keys only loopback is bound.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        keys: Keys | None = None,
    ) -> None:
        at = access(host, keys)
        directory, lock = Directory(at), threading.Lock()

        class Handler(_Handler):
            keys = at.keys
            challenges = Challenges(at.keys.registry) if at.keys else None

            def act(self, call: Callable[[Directory, float], Any]) -> Any:
                with lock:
                    return call(directory, clock())

        self._server = _Server((at.host, port), Handler)
        self.url = f"http://{at.host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvferry-registry", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> RegistryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # many workers come at once when an instance starts

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)  # each has a thread
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own would ask the DNS for our name
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is none of our business."""


class _Handler(BaseHTTPRequestHandler):
    """PUT /v1/instances/NAME, GET /v1/instances/NAME, DELETE /v1/instances/NAME/RANK/GENERATION; JSON bodies.
    GET /v1/instances lists everything.

    With keys each of them carries a signature over a fresh challenge, GET /v1/challenge.
    """

    timeout = 10.0
    keys: Keys | None = None
    challenges: Challenges | None = None
    _signature = ""

    def act(self, call: Callable[[Directory, float], Any]) -> Any:
        raise NotImplementedError

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return self._reply(413, {"error": f"a body of at most {MAX_BODY_BYTES} bytes is expected"})
        body = self.rfile.read(int(length))
        if not self._signed(body):
            return
        try:
            put = decode_json(body, _Put)
            self.act(lambda directory, now: directory.put(put.entry, put.ttl_s, now))
        except (DocumentError, RegistryError) as error:
            return self._reply(409 if isinstance(error, RegistryError) else 400, {"error": str(error)})
        self._reply(200, {})

    def do_GET(self) -> None:
        if self.challenges and self.path == CHALLENGE_PATH:
            return self._reply(200, {"challenge": self.challenges.draw()})
        if not self._signed(b""):
            return
        if self.path == _PREFIX.rstrip("/"):
            return self._reply(200, self.act(lambda directory, now: directory.listing(now)))
        names = self._names()
        if len(names) != 1:
            return self._reply(404, {"error": "no such resource"})
        self._reply(200, self.act(lambda directory, now: directory.view(names[0], now)))

    def do_DELETE(self) -> None:
        if not self._signed(b""):
            return
        names = self._names()
        if len(names) != 3 or not (names[1].isdecimal() and names[2].isdecimal()):
            return self._reply(404, {"error": "no such resource"})
        self.act(lambda directory, _: directory.delete(names[0], int(names[1]), int(names[2])))
        self._reply(200, {})

    def _signed(self, body: bytes) -> bool:
        """Whether the request may be served; where not, that has been said."""
        if self.challenges is None:
            return True
        try:
            header = self.headers.get("Authorization", "")
            self._signature = self.challenges.check(header, self.command, self.path, body)
        except Unsigned as error:
            self._reply(401, {"error": str(error)})
        return bool(self._signature)

    def _names(self) -> list[str]:
        return [unquote(n) for n in self.path[len(_PREFIX) :].split("/")] if self.path.startswith(_PREFIX) else []

    def _reply(self, status: int, document: object) -> None:
        body = encode_json(document)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.keys and self._signature:
            self.send_header(ANSWER_HEADER, answer_mac(self.keys.registry, self._signature, status, body))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """One line per renewal would drown everything else."""


class _Challenge(Struct, frozen=True):
    challenge: Annotated[str, msgspec.Meta(max_length=256, pattern="^[0-9a-f]+\\Z")]


class Registry:
    """Client. Every call opens its own connection, so it may be used from any thread.

    With `keys` it talks only to a registry that proves to hold the same deployment's.
    """

    def __init__(self, url: str, timeout_s: float = 2.0, keys: Keys | None = None) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is none
            host = port = None
        if not host or not port or parts.scheme != "http":
            raise RegistryError(f"registry: expected a URL such as http://127.0.0.1:7000, got {url!r}")
        self.url, self.host, self._port, self._timeout_s, self._keys = url, host, port, timeout_s, keys

    def at(self, url: str) -> Registry:
        """Another registry, asked in the same way."""
        return Registry(url, self._timeout_s, self._keys)

    def put(self, entry: Entry, ttl_s: float) -> None:
        self._call("PUT", _PREFIX + quote(entry.instance, safe=""), encode_json(_Put(entry, ttl_s)))

    def instance(self, name: str) -> View:
        data = self._call("GET", _PREFIX + quote(name, safe=""))
        try:
            view = decode_json(data, View)
        except DocumentError as error:
            raise RegistryError(f"registry {self.url}: unreadable answer: {error}") from None
        # checked again here, so that a wrong registry can't make half an instance look whole
        if view.ready and [e.rank for e in view.workers] != list(range(view.workers[0].world if view.workers else -1)):
            raise RegistryError(f"registry {self.url}: says {name!r} is ready but its ranks are not 0 … world-1")
        return view

    def listing(self) -> tuple[Listed, ...]:
        """Everything that is registered, by instance and rank."""
        data = self._call("GET", _PREFIX.rstrip("/"))
        try:
            return decode_json(data, tuple[Listed, ...])
        except DocumentError as error:
            raise RegistryError(f"registry {self.url}: unreadable answer: {error}") from None

    def delete(self, entry: Entry) -> None:
        self._call("DELETE", f"{_PREFIX}{quote(entry.instance, safe='')}/{entry.rank}/{entry.generation}")

    def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        if self._keys is None:
            status, data, _ = self._exchange(method, path, body)
        else:
            signer = Signer(self._keys.registry, self._challenge())
            authorization = {"Authorization": signer.header(method, path, body)}
            status, data, signature = self._exchange(method, path, body, authorization)
            # 401 says that our signature means nothing there, so its own means nothing here
            if status != 401 and not signer.answers(signature, status, data):
                raise RegistryError(f"registry {self.url}: its answer is not signed with this deployment's keys")
        if status != 200:
            raise RegistryError(f"registry {self.url}: {status}: {data[:400].decode(errors='replace')}")
        return data

    def _challenge(self) -> str:
        status, data, _ = self._exchange("GET", CHALLENGE_PATH, b"")
        if status == 200:
            try:
                return decode_json(data, _Challenge).challenge
            except DocumentError:
                pass
        raise RegistryError(f"registry {self.url}: has no keys and this side has; set KVFERRY_KEYS on both")

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, bytes, str]:
        """Status, body and signature of the answer."""
        connection = http.client.HTTPConnection(self.host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body or None, dict(headers))
            response = connection.getresponse()
            data = response.read(MAX_ENTRIES * 1024)
            return response.status, data, response.headers.get(ANSWER_HEADER, "")
        except (OSError, http.client.HTTPException) as error:
            raise RegistryError(f"registry {self.url}: {error or type(error).__name__}") from None
        finally:
            connection.close()
