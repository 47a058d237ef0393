"""Real servers of other kinds of model: a hybrid with sliding windows, latent attention (MLA), and gated delta nets.

What a plain server can't run on this machine is skipped with what the server said; `test_states` moves the same on
synthetic pools.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.sglang.park import PROMPTS, Tokens, all_at_once, one_by_one, through
from tests.engines.sglang.servers import Server, generate, healthy

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(500)]
KINDS = ("sliding", "latent", "gated")
MAKE = Path(__file__).parent / "make_models.py"
Start = Callable[..., Server]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        command = [sys.executable, str(MAKE), kind, str(folder / kind)]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def start(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server of a kind of model; at most four run."""
    folder = tmp_path_factory.mktemp("logs")
    running: list[Server] = []

    def begin(model: str, kind: str, **options: object) -> Server:
        server = Server(kind, models[model], folder, core=random.randrange(2), **options)  # type: ignore[arg-type]
        running.append(server)
        return server

    yield begin
    for server in running:
        server.stop()
    assert not [pid for server in running for pid in server.pids()], "a server process is left"


def tokens_of(plain: Server, known_to_run: bool) -> Tokens:
    """What a plain server says; else a skip with its reason, where it isn't known that this model runs here."""
    try:
        plain.wait()
        return [generate(plain.port, prompt)[1]["output_ids"] for prompt in PROMPTS]
    except (AssertionError, OSError):
        if known_to_run:
            raise
        lines = [line for line in plain.text().splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
        pytest.skip(f"SGLang can't serve this model here: {lines[0] if lines else plain.text()[-500:]}")
    finally:
        plain.stop()


@pytest.mark.parametrize(("model", "decode_tp", "page"), [("sliding", 2, 1), ("latent", 2, 16), ("gated", 1, 16)])
def test_tokens_equal_those_of_a_plain_server(start: Start, model: str, decode_tp: int, page: int) -> None:
    """Prompts from shorter than a window to many windows long, one rank into two.

    Sliding windows with pages of one token only: SGLang's torch attention reads their pool by the slots of the other
    one, without translating them. Both are the same as long as both pools give out slots in the same order.
    """
    plain = start(model, "plain", page=page)
    expected = tokens_of(plain, known_to_run=model != "gated")
    prefill = start(model, "prefill", page=page)
    decode = start(model, "decode", page=page, tp=decode_tp)
    try:
        assert len({tuple(each) for each in expected}) == len(PROMPTS)  # what comes depends on the prompt
        assert ("SWAKVPool" in plain.text()) == (model == "sliding")
        prefill.wait()
        decode.wait()
        assert one_by_one(prefill, decode) == expected
        assert all_at_once(prefill, decode) == expected
    finally:
        for server in (prefill, decode):
            server.stop()


def test_another_model_is_refused_on_its_own_request_only(start: Start) -> None:
    """F18, F37: under one name, so that what is cached has to tell. SGLang itself compares page size and dtype only."""
    name = ["--served-model-name", "same"]
    prefill, decode, other = (
        start("sliding", "prefill", arguments=name),
        start("sliding", "decode", arguments=name),
        start("latent", "decode", arguments=name),
    )
    for server in (prefill, decode, other):
        server.wait()
    status, answer = through(prefill, other, PROMPTS[1])
    assert status != 200
    text = str(answer)
    assert "groups.full" in text and "'present'" in text and "'missing'" in text, text
    print(f"\nanother model: {status} {text[:300]}")
    status, answer = through(prefill, decode, PROMPTS[1])
    assert status == 200, answer
    assert all(healthy(server) for server in (prefill, decode, other))
