"""Real SGLang servers, started as the example's scripts start them; each is ended by its own process ids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.group import OWN_GROUP

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "sglang"
READY = ("The server is fired up and ready to roll", "Uvicorn running on")
READY_S, REQUEST_S, STOP_S = 300.0, 120.0, 15.0
NEW_TOKENS = 24


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Server:
    """One server. `kind`: plain, prefill or decode; `paths`: folders for PYTHONPATH; `arguments`, `variables`: more for
    its command line and environment. The log is `log`.
    """

    def __init__(
        self,
        kind: str,
        model: Path,
        folder: Path,
        *,
        tp: int = 1,
        core: int = 0,
        page: int = 1,
        paths: str = "",
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.bootstrap_port = free_ports(2)
        self.tp = tp
        self.log = folder / f"{kind}-tp{tp}-page{page}-{self.port}.log"
        environment = {
            **os.environ,
            "MODEL": str(model),
            "SGLANG_VENV": os.environ.get("SGLANG_VENV", str(Path(sys.prefix))),
            "PORT": str(self.port),
            "BOOTSTRAP_PORT": str(self.bootstrap_port),
            "TP": str(tp),
            "CORES": "0|1" if tp > 1 else str(core),
            "PYTHONPATH": paths,
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
            **(variables or {}),
        }
        command = [str(SCRIPTS / f"{kind}.sh"), "--page-size", str(page), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,  # a terminal stops a group in the background that reads it
                stdout=log,
                stderr=subprocess.STDOUT,
                **OWN_GROUP,
            )
        self.started_s = time.monotonic()

    def wait(self) -> Server:
        """Until it is ready; an AssertionError shows the end of its log."""
        while not all(sign in self.text() for sign in READY):
            alive, in_time = self.process.poll() is None, time.monotonic() < self.started_s + READY_S
            if not alive or not in_time:
                self.stop()
                raise AssertionError(
                    f"{self.log.name} {'is not ready' if alive else 'has ended'}:\n{self.text()[-3000:]}"
                )
            time.sleep(0.2)
        return self

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every process of the group that this server began."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """SIGTERM doesn't end a server with an open request, so what is left is killed."""
        if self.process.poll() is None:
            self.process.terminate()
        end_s = time.monotonic() + STOP_S
        while self.pids() and time.monotonic() < end_s:
            time.sleep(0.1)
            self.process.poll()
        self.kill()

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def post(port: int, path: str, body: dict[str, Any], timeout_s: float = REQUEST_S) -> tuple[int, Any]:
    """(status, decoded body)."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def generate(port: int, prompt: list[int], new_tokens: int = NEW_TOKENS, **extra: Any) -> tuple[int, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return post(port, "/generate", {"input_ids": prompt, "sampling_params": sampling, **extra})


def healthy(server: Server) -> bool:
    """What SGLang itself says, by a request through its scheduler."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health_generate", timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def write_plugin(folder: Path, name: str, code: str) -> str:
    """A package in `folder` whose `load` SGLang calls at start; the folder, for PYTHONPATH."""
    (folder / f"{name}.py").write_text(code)
    package = folder / f"{name}-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:load\n")
    return str(folder)
