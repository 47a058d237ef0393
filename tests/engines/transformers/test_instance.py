"""Real worker processes with a tiny random Llama. Starting them takes most of the time: one pair serves all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvferry.engines.transformers.instance import TransformersInstance  # noqa: E402
from kvferry.engines.transformers.model import load_model, plain_tokens  # noqa: E402
from kvferry.errors import EngineError, WorkerFailed  # noqa: E402
from kvferry.session import RegistryServer  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # processes that load PyTorch: seconds alone, minutes on a busy machine
PROMPTS = [
    [5, 3, 40, 8, 9, 33, 1, 2, 60, 21, 22],
    [7],
    [index * 11 % 67 for index in range(45)],
]
BYTES_PER_TOKEN = 3 * 2 * 4 * 8 * 4  # layers, parts, KV heads, head_dim, float32
ANSWER = 16


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with RegistryServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def pair(tiny_model: Path, registry: str) -> Iterator[dict[int, TransformersInstance]]:
    with (
        # 11 and 4 pages: no more than one request of this module needs, so that a page not given back shows
        TransformersInstance(tiny_model, name="one", registry=registry, tp=1, page_tokens=6, pages=11) as one,
        TransformersInstance(
            tiny_model, name="two", registry=registry, tp=2, page_tokens=16, pages=4, layout="hnd"
        ) as two,
    ):
        one.ready()
        two.ready()
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(tiny_model)


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
def test_tokens_equal_a_plain_run(pair: Any, model: Any, prompt: list[int], source: int, target: int) -> None:
    prefilled = pair[source].prefill(f"{len(prompt)}-{source}-{target}", prompt)
    decoded = pair[target].decode(prefilled, ANSWER)
    sent = pair[source].release(prefilled)
    assert list(decoded.tokens) == plain_tokens(model, prompt, ANSWER)
    assert sum(moved.bytes for moved in decoded.moved) == len(prompt) * BYTES_PER_TOKEN
    assert [moved.bytes for moved in sent] == [len(prompt) * BYTES_PER_TOKEN // source] * source


def test_a_failed_command_leaves_the_workers_usable(pair: Any, model: Any) -> None:
    with pytest.raises(WorkerFailed, match=r"'two', worker 0: .* pages wanted, 4 of 4 are free"):
        pair[2].prefill("too-long", list(range(65)))
    prefilled = pair[2].prefill("after", PROMPTS[0])
    decoded = pair[1].decode(prefilled, ANSWER)
    pair[2].release(prefilled)
    assert list(decoded.tokens) == plain_tokens(model, PROMPTS[0], ANSWER)


def test_sizes_that_can_not_work_are_refused_before_anything_starts(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="size 3 does not divide the model's 4 KV heads"):
        TransformersInstance(tiny_model, name="three", registry="", tp=3, pages=4)
    with pytest.raises(EngineError, match="page size must be ≥ 1 token, got 0"):
        TransformersInstance(tiny_model, name="zero", registry="", page_tokens=0, pages=4)


def test_a_dead_worker_is_reported(tiny_model: Path, registry: str) -> None:
    with TransformersInstance(tiny_model, name="short-lived", registry=registry, pages=4) as instance:
        instance.ready()
        os.kill(instance.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="'short-lived', worker 0: the process ended with exit code -9"):
            instance.prefill("lost", PROMPTS[0])


def test_a_worker_that_can_not_start_says_why(tmp_path: Path, tiny_model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with TransformersInstance(broken, name="broken", registry="", pages=4) as instance:
        with pytest.raises(WorkerFailed, match=r"'broken', worker 0: .*broken"):
            instance.ready()
