from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.sglang.park import PROMPTS, Park, Tokens, listening, shared_memory
from tests.engines.sglang.servers import Server, generate

ROOT = Path(__file__).parents[3]
NEEDED = "sglang is not importable: run `make test-sglang`, or scripts/setup_sglang.sh and that environment's Python"

# for the tests that use SGLang in this process: read when it is imported
os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        for item in items:
            if item.get_closest_marker("sglang"):
                item.add_marker(pytest.mark.skip(reason=NEEDED))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    command = [sys.executable, str(ROOT / "examples/sglang/make_model.py"), str(folder)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    server = Server("plain", model, tmp_path_factory.mktemp("plain")).wait()
    try:
        tokens: Tokens = [generate(server.port, prompt)[1]["output_ids"] for prompt in PROMPTS]
    finally:
        server.stop()
    assert len({tuple(each) for each in tokens}) == len(PROMPTS)  # what comes depends on the prompt
    return tokens
