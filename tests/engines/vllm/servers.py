"""vLLM servers as a user starts them, each a process of its own, and what a router does between two of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.group import OWN_GROUP

ROOT = Path(__file__).parents[3]
READY_S = 360.0
END_S = 15.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


CPU = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8")
"""What a small server on a CPU needs; the rest is each test's own."""
MEMORY = ("--kv-cache-memory-bytes", "67108864", "--shutdown-timeout", "5", "--served-model-name", "m")


LOGS: set[str] = set()
"""Of every server that was started here. Its processes write there, whatever they do with their names and groups."""


class Server:
    """One vLLM server from its command; `ready` waits for it, `close` ends it and everything that it started."""

    def __init__(self, name: str, command: list[str], port: int, folder: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        LOGS.add(os.path.realpath(self.log))
        own = {"VLLM_RPC_BASE_PATH": str(folder), "TMPDIR": str(folder), "KVFERRY_DUMP": str(folder / "dumps")}
        own |= {"PORT": str(port), "PYTHON": sys.executable}  # for the example's scripts
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **own},
                **OWN_GROUP,
            )
        self.started_s = time.monotonic()

    @staticmethod
    def of_model(name: str, model: Path, folder: Path, *options: str, connector: dict[str, Any] | None) -> Server:
        """A server as a user starts it, with `--kv-transfer-config` unless `connector` is None."""
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *CPU, *MEMORY, *options]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        return Server(name, command, port, folder)

    @staticmethod
    def of_script(script: Path, model: Path, folder: Path) -> Server:
        """A server as an example's script starts it."""
        return Server(script.stem, [str(script), str(model), *CPU, *MEMORY], free_port(), folder)

    def ready(self) -> Server:
        """Wait until it serves; AssertionError with the end of its log if it ends, or takes too long."""
        while time.monotonic() - self.started_s < READY_S:
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"{self.name} is not ready after {READY_S:g} s\n{self.tail()}")

    def post(
        self, path: str, body: dict[str, Any], timeout_s: float = 90.0, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer's JSON; for an HTTP error its body, with `status` added."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": f"test-{uuid.uuid4().hex[:12]}", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return {"status": error.code, "error": error.read().decode(errors="replace")}

    def complete(
        self,
        prompt: list[int] | str,
        tokens: int = 24,
        timeout_s: float = 90.0,
        headers: dict[str, str] | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Greedy completion of exactly `tokens` tokens. TimeoutError, and the connection closed, after `timeout_s`."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", {**body, "return_token_ids": True, **extra}, timeout_s, headers)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def kill(self) -> None:
        """At once, as a crash would."""
        kill_group(self.process.pid)
        self.process.wait()

    def close(self) -> None:
        """As a user ends it; killed where that takes too long. No process of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                pass
        self.kill()


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """AssertionError where a process of a server is there afterwards that wasn't before, of those started here: another
    run beside this one may have its own. Landing memory ends with its process.

    A vLLM that is killed leaves names in /dev/shm; those that no process maps any more are removed.
    """
    before, names = _serving(), set(os.listdir("/dev/shm"))
    yield
    end_s = time.monotonic() + END_S
    while (left := _serving() - before) and time.monotonic() < end_s:
        time.sleep(0.1)  # what was killed takes a while to end on a busy machine
    assert not left, f"still there {END_S:g} s after their servers were ended: {sorted(left)}"
    for name in set(os.listdir("/dev/shm")) - names:
        if not any(f"/dev/shm/{name}" in maps for maps in _each_process("maps").values()):
            Path("/dev/shm", name).unlink(missing_ok=True)


def _serving() -> set[str]:
    return {
        f"{process}: {command[:100]}"
        for process, command in _each_process("cmdline").items()
        if _output(process) in LOGS
    }


def _output(process: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/fd/1")
    except OSError:
        return ""


def _each_process(file: str) -> dict[str, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[process.name] = (process / file).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def signal_all(server: Server, number: signal.Signals) -> None:
    """To each of its processes, if it runs."""
    if server.process.poll() is None:
        os.killpg(server.process.pid, number)


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """The tokens of a completion; AssertionError with the whole answer where there are none."""
    assert "choices" in answer, answer
    return list(answer["choices"][0]["token_ids"])


def prefill(server: Server, prompt: list[int] | str) -> dict[str, Any]:
    """Run a prompt and return what the router passes on."""
    answer = server.complete(prompt, 1, kv_transfer_params=dict(ASK_PREFILL))
    assert answer.get("kv_transfer_params"), answer
    return dict(answer["kv_transfer_params"])


def disaggregated(source: Server, target: Server, prompt: list[int] | str, tokens: int = 24) -> dict[str, Any]:
    """What a router does: the prompt to prefill, its parameters and the prompt to decode."""
    return target.complete(prompt, tokens, kv_transfer_params=prefill(source, prompt))


def connector(role: str, name: str = "KVFerryConnector", policy: str = "fail", **extra: Any) -> dict[str, Any]:
    if "KVFERRY_TRANSPORT" in os.environ:  # as SGLang's connector reads it: the whole suite over another transport
        extra["transport"] = os.environ["KVFERRY_TRANSPORT"]
    module = "kvferry.engines.vllm" if name == "KVFerryConnector" else "tests.engines.vllm.damaged"
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def received(server: Server) -> list[int]:
    """Bytes of each load that has arrived, one per worker."""
    return [int(found) for found in re.findall(r"kvferry: received \S+: (\d+) bytes", server.text())]


def idle(*servers: Server) -> None:
    """Wait until no block of these servers is in use; AssertionError where one stays."""
    for server in servers:
        end_s = time.monotonic() + 15
        while (used := usage(server)) > 0:
            assert time.monotonic() < end_s, f"{server.name}: {used:.1%} of its blocks are still in use"
            time.sleep(0.1)


def usage(server: Server) -> float:
    return metric(server, "vllm:kv_cache_usage_perc")


def metric(server: Server, name: str) -> float:
    """One sample of the server's metrics, whatever its labels; AssertionError where it has none."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
        found = re.search(rf"^{re.escape(name)}[{{ ]\S* ?(\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None, f"{server.name}: no metric {name}"
    return float(found[1])
