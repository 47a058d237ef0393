"""Servers that tests share, and the requests that they put through them."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

from tests.engines.sglang.servers import Server, generate

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


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "kvferry" in path.name}


def listening() -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
