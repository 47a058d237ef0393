"""Faults that are shown for stock connectors, on real servers: the one that survives answers the next request rightly.

Three servers for all of it: prefill A, which stops itself in the middle of a write when told to, prefill B and decode.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.engines.sglang.park import PROMPTS, Tokens, listening, one_by_one, room, shared_memory, through
from tests.engines.sglang.servers import Server, generate, healthy, post, write_plugin

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(400)]
WAITING_S = 6

STOPPER = '''
"""Stops its scheduler in the middle of the next write, half of a piece in decode's slot, while a file says so."""
import os, pathlib, signal, time

def load():
    from kvferry.session import writing
    folder = pathlib.Path(os.environ["STOPPER"])
    honest = writing.Writer._send

    def send(self, link, job, copies, gather):
        def stopping(out):
            gather(out)
            try:
                (folder / "stop").unlink()
            except FileNotFoundError:
                return
            rest = out[len(out) // 2:].copy()
            out[len(out) // 2:] = 0
            (folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # the main thread takes the signal, and stops the others only when it is scheduled
            out[len(out) // 2:] = rest
        return honest(self, link, job, copies, stopping)

    writing.Writer._send = send
'''


@dataclass
class Trio:
    """`folder`: a file `stop` in it makes prefill A stop itself."""

    a: Server
    b: Server
    decode: Server
    folder: Path
    start: Callable[[str], Server]

    def stopped(self) -> int:
        """The process that has stopped itself, waited for."""
        path = self.folder / "stopped"
        wait_for(path.exists, 20)
        time.sleep(0.2)
        pid = int(path.read_text())
        path.unlink()
        return pid


@pytest.fixture(scope="module")
def trio(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    before = shared_memory()
    folder = tmp_path_factory.mktemp("faults")
    plugin = write_plugin(folder, "stopper", STOPPER)
    everything: list[Server] = []

    def start(kind: str) -> Server:
        variables = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAITING_S), "STOPPER": str(folder)}
        variables["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = str(WAITING_S)
        core = 1 if kind == "decode" else 0
        paths = plugin if kind == "prefill" else ""
        server = Server(kind, model, folder, page=16, core=core, paths=paths, variables=variables)
        everything.append(server)
        return server

    try:
        a, b, decode = [each.wait() for each in [start("prefill"), start("prefill"), start("decode")]]
        yield Trio(a, b, decode, folder, start)
    finally:
        for server in everything:
            server.stop()
    assert not [pid for server in everything for pid in server.pids()], "a server process is left"
    assert shared_memory() <= before, "shared memory is left"


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it didn't happen in time"
        time.sleep(0.02)


class Asking:
    """A request under way in a thread of its own."""

    def __init__(self, call: Callable[[], tuple[int, Any]]) -> None:
        self._answers: list[tuple[int, Any]] = []
        self.thread = threading.Thread(target=lambda: self._answers.append(call()), daemon=True)
        self.thread.start()

    def answer(self, timeout_s: float) -> tuple[int, Any]:
        self.thread.join(timeout_s)
        assert self._answers, "no answer came in time"
        return self._answers[0]


def right(prefill: Server, decode: Server, plain: Tokens, index: int = 2) -> None:
    """The next request is answered rightly, and both servers say that they are well."""
    status, answer = through(prefill, decode, PROMPTS[index])
    assert status == 200, answer
    assert answer["output_ids"] == plain[index]
    assert healthy(prefill) and healthy(decode)


# junk


def ports_of(server: Server) -> list[int]:
    """Every TCP port on which a process of this server listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    by_inode = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    found = set()
    for pid in server.pids():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                name = os.readlink(entry)
            except OSError:
                continue
            if name.startswith("socket:[") and name[8:-1] in by_inode:
                found.add(by_inode[name[8:-1]])
    return sorted(found)


RAW = (
    b"",
    b"junk\n" * 100,
    bytes(range(256)) * 16,
    b"GET / HTTP/1.1\r\n\r\n",
    b'PUT /route HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"a": 1}}',
    b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48,  # the beginning of ZeroMQ's greeting
)
FRAMES = ([b"junk"], [b""], [b"\x81\xa4type\xa3ask"], [b"ABORT", b"-1", b"127.0.0.1"], [b"x" * 100_000], [b"a"] * 50)


def throw_junk(port: int) -> None:
    for data in RAW:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(data)
                connection.settimeout(0.05)
                connection.recv(100)
        except OSError:
            pass
    with zmq.Context() as context:
        for kind in (zmq.PUSH, zmq.DEALER, zmq.REQ):
            with context.socket(kind) as sender:
                sender.setsockopt(zmq.LINGER, 200)
                sender.setsockopt(zmq.SNDTIMEO, 300)
                sender.connect(f"tcp://127.0.0.1:{port}")
                for frames in FRAMES:
                    try:
                        sender.send_multipart(frames)
                    except zmq.ZMQError:
                        break


def test_junk_on_every_port(trio: Trio, plain: Tokens) -> None:
    """F65. Health stays honest: it says 200, and the next request is answered."""
    print()
    for name, server in (("prefill", trio.b), ("decode", trio.decode)):
        ports = ports_of(server)
        assert {server.port} <= set(ports)
        for port in ports:
            throw_junk(port)
        print(f"{name}: junk on {len(ports)} ports: {ports}")
    right(trio.b, trio.decode, plain)


def bootstrap(server: Server, path: str, body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{server.bootstrap_port}{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def home_of(server: Server) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.bootstrap_port}/kvferry?dp_rank=0", timeout=5) as response:
        return dict(json.loads(response.read()))


def test_forged_and_repeated_registrations(trio: Trio, plain: Tokens) -> None:
    """F62, F67: a rank that is there can't be registered again as another one, and junk registers nothing."""
    home = home_of(trio.b)
    names = ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")
    rank: dict[str, Any] = {f"{name}_{what}": int(what == "size") for name in names for what in ("size", "rank")}
    rank |= {"rank_ip": "127.0.0.1", "rank_port": 9, "page_size": 16, "kv_cache_dtype": "float32"}
    forged = {**rank, "kvferry": {"instance": "sglang-prefill-forged.dp0", "registry": "http://127.0.0.1:9"}}
    assert bootstrap(trio.b, "/route", forged)[0] == 409
    assert bootstrap(trio.b, "/route", {**rank, "kvferry": home})[0] == 409  # another port for the same rank
    status, text = bootstrap(trio.b, "/route", {**forged, "attn_tp_size": 2, "attn_tp_rank": 1})
    assert status == 400 and "(2, 1, 1, 1, 1)" in text and "(1, 1, 1, 1, 1)" in text
    for junk in (
        b"",
        b"[]",
        b"{",
        b'{"kvferry": 1}',
        b"\xff" * 100,
        {**rank, "kvferry": {}},
        {**forged, "pp_rank": -1},
    ):
        assert bootstrap(trio.b, "/route", junk)[0] == 400, junk
    assert home_of(trio.b) == home
    right(trio.b, trio.decode, plain)


# a peer that stops


def test_decode_gives_up_while_prefill_stands_in_a_write(trio: Trio, plain: Tokens) -> None:
    """F51. Decode gives the pages to other requests, which are read while prefill goes on with its old write."""
    right(trio.a, trio.decode, plain)
    (trio.folder / "stop").write_text("")
    where = room(trio.a)
    first = Asking(lambda: generate(trio.a.port, PROMPTS[6], **where))
    second = Asking(lambda: generate(trio.decode.port, PROMPTS[6], **where))
    pid = trio.stopped()
    try:
        status, answer = second.answer(WAITING_S + 20)
        assert status != 200, answer
        print(f"\ndecode, {WAITING_S} s limit: {status} {json.dumps(answer)[:300]}")
        # every page that the failed request had is another's now, and is read until after prefill has gone on
        long = [Asking(lambda i=i: through(trio.b, trio.decode, PROMPTS[i])) for i in range(len(PROMPTS))]
        time.sleep(0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [each.answer(60)[1]["output_ids"] for each in long] == plain
    first.answer(60)
    right(trio.a, trio.decode, plain)
    assert one_by_one(trio.b, trio.decode) == plain


def test_prefill_gets_no_peer(trio: Trio, plain: Tokens) -> None:
    """F56: decode never asks; prefill ends the request by its own limit, or when it is told to, and frees its pages."""
    where = {**room(trio.b), "rid": "nobody-asks"}
    waiting = Asking(lambda: generate(trio.b.port, PROMPTS[5], **where))
    status, answer = waiting.answer(WAITING_S + 30)
    assert status != 200, answer
    where = {**room(trio.b), "rid": "given-up"}
    waiting = Asking(lambda: generate(trio.b.port, PROMPTS[5], **where))
    time.sleep(0.5)
    began_s = time.monotonic()
    try:
        post(trio.b.port, "/abort_request", {"rid": "given-up"})
    except ValueError:
        pass  # an answer without a body
    _, answer = waiting.answer(WAITING_S + 30)
    assert "abort" in str(answer).lower(), answer
    print(f"\nprefill alone: told to stop, it ended after {time.monotonic() - began_s:.1f} s")
    right(trio.b, trio.decode, plain)


# a peer that dies


def test_decode_is_killed(trio: Trio, plain: Tokens) -> None:
    """Prefill's pages come back, and it serves the next decode server."""
    (trio.folder / "stop").write_text("")
    where = room(trio.a)
    first = Asking(lambda: generate(trio.a.port, PROMPTS[6], **where))
    dying = trio.decode
    second = Asking(lambda: generate_or_lost(dying, PROMPTS[6], where))
    pid = trio.stopped()
    dying.kill()
    os.kill(pid, signal.SIGCONT)
    status, answer = first.answer(WAITING_S + 30)
    print(f"\nprefill, after decode was killed in the middle of a write: {status} {json.dumps(answer)[:300]}")
    second.answer(10)
    assert healthy(trio.a) and healthy(trio.b)
    trio.decode = trio.start("decode").wait()
    right(trio.a, trio.decode, plain)
    right(trio.b, trio.decode, plain)


def generate_or_lost(server: Server, prompt: list[int], where: dict[str, Any]) -> tuple[int, Any]:
    try:
        return generate(server.port, prompt, **where)
    except OSError as error:
        return 0, str(error)


def test_prefill_is_killed_in_the_middle_of_a_write(trio: Trio, plain: Tokens) -> None:
    (trio.folder / "stop").write_text("")
    where = room(trio.a)
    first = Asking(lambda: generate_or_lost(trio.a, PROMPTS[6], where))
    second = Asking(lambda: generate(trio.decode.port, PROMPTS[6], **where))
    trio.stopped()
    began_s = time.monotonic()
    trio.a.kill()
    status, answer = second.answer(WAITING_S + 20)
    assert status != 200
    print(f"\ndecode, {time.monotonic() - began_s:.1f} s after prefill was killed: {status} {json.dumps(answer)[:300]}")
    first.answer(10)
    right(trio.b, trio.decode, plain)
    assert one_by_one(trio.b, trio.decode) == plain


def test_no_internal_error_was_logged(trio: Trio) -> None:
    """All of the above ended in typed errors."""
    assert trio.b.port in listening() and trio.decode.port in listening()
    for server in (trio.b, trio.decode):
        assert "internal error" not in server.text()
