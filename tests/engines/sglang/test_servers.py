"""Real servers: what decode continues from a moved cache equals what one plain server says.

Servers are reused from case to case: starting them takes most of the time. So the cases of one page size run in the
order in which they are written.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.servers import SCRIPTS, Server, free_ports, generate, post

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)]
LENGTHS = (5, 17, 40, 63, 151, 300, 500)
_draw = random.Random(7)
PROMPTS = [[_draw.randrange(3, 259) for _ in range(length)] for length in LENGTHS]
_rooms = itertools.count(random.randrange(1 << 60))
Tokens = list[list[int]]


def room(prefill: Server) -> dict[str, Any]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": next(_rooms)}


def through(prefill: Server, decode: Server, prompt: list[int], **extra: Any) -> tuple[int, Any]:
    """The same request to both, as a router does it; decode's answer."""
    where = room(prefill)
    other = threading.Thread(target=generate, args=(prefill.port, prompt), kwargs={**where, **extra})
    other.start()
    answer = generate(decode.port, prompt, **where, **extra)
    other.join()
    return answer


def one_by_one(prefill: Server, decode: Server) -> Tokens:
    return [through(prefill, decode, prompt)[1]["output_ids"] for prompt in PROMPTS]


def all_at_once(prefill: Server, decode: Server) -> Tokens:
    found: dict[int, list[int]] = {}

    def run(index: int) -> None:
        found[index] = through(prefill, decode, PROMPTS[index])[1]["output_ids"]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(PROMPTS))]


class Park:
    """The servers of this module, by what they are; at most four at a time."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._running: dict[tuple[str, int, int, str], Server] = {}
        self.all: list[Server] = []

    def get(self, *wanted: tuple[str, int, int, str]) -> list[Server]:
        """(kind, tp, page, PYTHONPATH) each. Those that aren't wanted and of another page size are stopped."""
        for key in [key for key in self._running if key not in wanted and (key[2] != wanted[0][2] or key[3])]:
            self._running.pop(key).stop()
        new = [key for key in wanted if key not in self._running]
        for key in new:
            kind, tp, page, paths = key
            core = 0 if kind == "prefill" else 1
            server = Server(kind, self._model, self._folder, tp=tp, page=page, core=core, paths=paths)
            self._running[key] = server
            self.all.append(server)
        for key in new:
            try:
                self._running[key].wait()
            except AssertionError:
                del self._running[key]
                raise
        return [self._running[key] for key in wanted]

    def pair(self, prefill_tp: int, decode_tp: int, page: int) -> tuple[Server, Server]:
        prefill, decode = self.get(("prefill", prefill_tp, page, ""), ("decode", decode_tp, page, ""))
        return prefill, decode

    def forget(self, server: Server) -> None:
        self._running = {key: each for key, each in self._running.items() if each is not server}

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()
        self._running.clear()


@pytest.fixture(scope="module")
def park(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Park]:
    before = shared_memory()
    park = Park(model, tmp_path_factory.mktemp("servers"))
    yield park
    park.stop()
    assert not [pid for server in park.all for pid in server.pids()], "a server process is left"
    ports = {port for server in park.all for port in (server.port, server.bootstrap_port)}
    assert not ports & listening(), "a socket is left"
    assert shared_memory() <= before, "shared memory is left"


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "kvferry" in path.name}


def listening() -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    server = Server("plain", model, tmp_path_factory.mktemp("plain")).wait()
    try:
        tokens: Tokens = [generate(server.port, prompt)[1]["output_ids"] for prompt in PROMPTS]
    finally:
        server.stop()
    assert len({tuple(each) for each in tokens}) == len(PROMPTS)  # what comes depends on the prompt
    return tokens


@pytest.mark.parametrize(("page", "sizes"), [(p, s) for p in (1, 16) for s in ((1, 1), (1, 2), (2, 1))])
def test_tokens_equal_those_of_a_plain_server(park: Park, plain: Tokens, page: int, sizes: tuple[int, int]) -> None:
    prefill, decode = park.pair(*sizes, page)
    assert one_by_one(prefill, decode) == plain
    assert all_at_once(prefill, decode) == plain


CONTROL = '''
"""Swaps the heads that the two decode ranks say they own: the transfer is flawless, and the model reads wrong heads."""
def load():
    from kvferry.engines.sglang import manager
    honest = manager.describe_cache
    manager.describe_cache = lambda cache, rank, size: honest(cache, size - 1 - rank, size)
'''


def test_wrong_heads_are_seen(park: Park, plain: Tokens, tmp_path: Path) -> None:
    """Negative control: the comparison above can fail."""
    (tmp_path / "wrong_heads.py").write_text(CONTROL)
    package = tmp_path / "wrong_heads-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-heads\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[sglang.srt.plugins]\nwrong_heads = wrong_heads:load\n")
    prefill, decode = park.get(("prefill", 1, 16, ""), ("decode", 2, 16, str(tmp_path)))
    found = one_by_one(prefill, decode)
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in plain]
    assert not any(ours == theirs for ours, theirs in zip(found, plain))


def test_the_example(park: Park, plain: Tokens) -> None:
    """OpenAI-compatible request in, text out, through the example's proxy."""
    prefill, decode = park.pair(1, 1, 16)
    (port,) = free_ports(1)
    where = f"127.0.0.1:{prefill.port}:{prefill.bootstrap_port}"
    command = [sys.executable, str(SCRIPTS / "proxy.py"), "--port", str(port), "--prefill", where]
    proxy = subprocess.Popen([*command, "--decode", f"127.0.0.1:{decode.port}"], stdout=subprocess.PIPE)
    try:
        assert proxy.stdout is not None and b"listening" in proxy.stdout.readline()
        body = {"model": "tiny-llama", "prompt": PROMPTS[2], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        status, answer = post(port, "/v1/completions", body)
        assert status == 200 and answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 24
        chat_body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        status, chat = post(port, "/v1/chat/completions", {**chat_body, "ignore_eos": True})
        assert status == 200 and chat["usage"]["completion_tokens"] == 8
        status, other = post(port, "/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
        assert status == 200 and other["meta_info"]["completion_tokens"] >= 1
        assert post(port, "/v1/completions", [])[0] == 400  # type: ignore[arg-type]
    finally:
        proxy.kill()
        proxy.wait()


def test_health_checks_need_no_peer(park: Park) -> None:
    """SGLang sends itself a request without a transfer."""
    for server in park.pair(1, 1, 16):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health_generate", timeout=60) as response:
            assert response.status == 200


def test_an_aborted_request_harms_no_other(park: Park, plain: Tokens) -> None:
    """Prefill never gets it, so decode waits with its pages allocated until it is told to stop."""
    prefill, decode = park.pair(1, 1, 16)
    answers: list[tuple[int, Any]] = []
    where = {**room(prefill), "rid": "given-up"}
    waiting = threading.Thread(target=lambda: answers.append(generate(decode.port, PROMPTS[3], **where)))
    waiting.start()
    assert through(prefill, decode, PROMPTS[1])[1]["output_ids"] == plain[1]
    assert post_only(decode.port, "/abort_request", {"rid": "given-up"}) == 200
    waiting.join(30)
    (_, answer), *_ = answers
    assert "abort" in str(answer).lower()
    assert one_by_one(prefill, decode) == plain


def post_only(port: int, path: str, body: dict[str, Any]) -> int:
    """The status of an answer that may have no body."""
    try:
        return post(port, path, body)[0]
    except ValueError:
        return 200


def test_bad_requests_fail_alone(park: Park, plain: Tokens) -> None:
    prefill, decode = park.pair(1, 1, 16)
    (nobody,) = free_ports(1)
    for change in ({"bootstrap_port": nobody}, {"bootstrap_host": "no such host"}, {"bootstrap_port": decode.port}):
        status, answer = generate(decode.port, PROMPTS[0], **{**room(prefill), **change})
        assert status != 200, answer
    assert one_by_one(prefill, decode) == plain


def test_prefill_dies_and_comes_back(park: Park, plain: Tokens) -> None:
    """Decode answers the request that was under way with an error, and the next one from a new prefill server."""
    prefill, decode = park.pair(1, 1, 16)
    answers: list[tuple[int, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(generate(decode.port, PROMPTS[4], **room(prefill))))
    waiting.start()
    time.sleep(1)
    prefill.kill()
    waiting.join(60)
    ((status, answer),) = answers
    assert status == 500 and "transfer" in str(answer).lower(), answer
    park.forget(prefill)
    again, decode = park.pair(1, 1, 16)
    assert again is not prefill
    assert one_by_one(again, decode) == plain
