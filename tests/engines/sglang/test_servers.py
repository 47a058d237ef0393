"""Real servers: what decode continues from a moved cache equals what one plain server says.

Servers are reused from case to case: starting them takes most of the time. So the cases of one page size run in the
order in which they are written.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.park import PROMPTS, Park, Tokens, all_at_once, one_by_one, room, through
from tests.engines.sglang.servers import SCRIPTS, free_ports, generate, post, write_plugin

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("page", "sizes"), [(p, s) for p in (1, 16) for s in ((1, 1), (1, 2), (2, 1))])
def test_tokens_equal_those_of_a_plain_server(park: Park, plain: Tokens, page: int, sizes: tuple[int, int]) -> None:
    prefill, decode = park.pair(*sizes, page)
    assert one_by_one(prefill, decode) == plain
    assert all_at_once(prefill, decode) == plain


CONTROL = '''
"""Swaps the heads that the two decode ranks say they own: the transfer is flawless, and the model reads wrong heads."""
def load():
    from kvferry.engines.sglang import pool
    honest = pool.describe_cache
    pool.describe_cache = lambda cache, rank, size: honest(cache, size - 1 - rank, size)
'''


def test_wrong_heads_are_seen(park: Park, plain: Tokens, tmp_path: Path) -> None:
    """Negative control: the comparison above can fail."""
    damaged = write_plugin(tmp_path, "wrong_heads", CONTROL)
    prefill, decode = park.get(("prefill", 1, 16, ""), ("decode", 2, 16, damaged))
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
