"""The example's three commands with a real model: an OpenAI request goes in at the proxy, text comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.servers import ENVIRONMENT, ROOT, Server, free_port, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "vllm"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def model() -> Path:
    from kvferry.engines.transformers.model import fetch_model
    from kvferry.errors import MissingExtra

    try:
        return fetch_model()
    except MissingExtra as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def example(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, str]]:
    """The prefill and the decode server as the scripts start them, and the proxy's URL."""
    folder = tmp_path_factory.mktemp("example")
    with nothing_left():
        servers = [Server.of_script(EXAMPLE / f"{name}.sh", model, folder) for name in ("prefill", "decode")]
        port = free_port()
        command = [sys.executable, str(EXAMPLE / "proxy.py"), "--port", str(port)]
        command += ["--prefill", servers[0].url, "--decode", servers[1].url]
        proxy = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT})
        try:
            yield servers[0].ready(), servers[1].ready(), f"http://127.0.0.1:{port}"
        finally:
            proxy.kill()
            proxy.wait()
            for server in servers:
                server.close()


def ask(url: str, **body: Any) -> bytes:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({"model": "m", "messages": QUESTION, "max_tokens": 16, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def text_of(answer: bytes) -> str:
    return str(json.loads(answer)["choices"][0]["message"]["content"])


def test_a_question_through_the_proxy(example: tuple[Server, Server, str], capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode, proxy = example
    text = text_of(ask(proxy))
    with capsys.disabled():
        print(f"\n  {QUESTION[0]['content']}\n  → {text}")
    assert "Paris" in text
    # the cache came over, and the answer is what a server alone gives
    assert "kvferry: received" in decode.text() and "kvferry: sent" in prefill.text()
    assert text == text_of(ask(prefill.url))


def test_a_streamed_answer(example: tuple[Server, Server, str]) -> None:
    lines = ask(example[2], stream=True, max_tokens=8).decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(events) > 4
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text and text_of(ask(example[2])).startswith(text)


def test_a_prefill_server_that_is_gone_is_said(example: tuple[Server, Server, str]) -> None:
    example[0].kill()
    started_s = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(example[2])
    assert raised.value.code == 502
    assert "can't be reached" in raised.value.read().decode()
    assert time.monotonic() - started_s < 20
