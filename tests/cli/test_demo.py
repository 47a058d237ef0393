"""The demo as a user runs it, in a process of its own. Those that start it are marked slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main as cli

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(
    300
)  # each starts processes that load PyTorch: seconds alone, minutes on a busy machine
DEMO = [sys.executable, "-m", "kvferry.cli.main", "demo"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines.transformers.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def demo(*options: str, timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
def test_json_of_a_tiny_model(tiny_model: Path) -> None:
    done = demo(
        *("--model", str(tiny_model), "--json", "--prompt", "Where are we?", "--prompt", "Who?"),
        *("--prefill-tp", "2", "--decode-tp", "1", "--max-tokens", "12"),
        *("--prefill-layout", "hnd", "--decode-page-tokens", "6"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["format"], summary["equal"], summary["total"]) == ("kvferry-demo/1", 2, 2)
    assert summary["prefill"] == {"tp": 2, "page_tokens": 16, "layout": "hnd"}
    assert summary["decode"] == {"tp": 1, "page_tokens": 6, "layout": "nhd"}
    for outcome, characters in zip(summary["prompts"], (13, 4), strict=True):
        assert outcome["tokens"] == outcome["plain_tokens"]
        assert len(outcome["tokens"]) == 12
        assert outcome["moved"]["bytes"] == characters * 3 * 2 * 4 * 8 * 4
    assert "Traceback" not in done.stderr


def test_different_tokens_fail_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry.cli import demo as module

    class Tokenizer:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return " ".join(map(str, tokens))

    moving = module.Moving(bytes=1000, copies=2, seconds=0.5, transports=("shm",))
    outcomes = tuple(
        module._outcome("p", [1], [4, 5, 6], plain, moving, Tokenizer()) for plain in ([4, 5, 6], [4, 9, 6], [4, 5])
    )
    assert [outcome.first_difference for outcome in outcomes] == [None, 1, 2]
    side = module.Instances(1, 16, "nhd")
    summary = module.Summary("kvferry-demo/1", "m", "float32", side, side, "auto", outcomes, 1, 3, 1.0)
    monkeypatch.setattr(module, "run_demo", lambda args, progress: summary)
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "tokens equal: 1/3" in out
    assert "DIFFERS from the plain run at token 1" in out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--decode-tp", "3"], "size 3 does not divide the model's 4 KV heads"),
        (["--model", "/nowhere"], "/nowhere: expected a folder"),
    ],
)
def test_bad_options_are_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert cli.main(["demo", "--model", str(tiny_model), *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvferry: error:") and problem in last


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry.engines.transformers import model

    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'kvferry[demo]'" in line


@pytest.fixture
def running(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A demo in a session of its own, while its workers start."""
    log = tmp_path / "stderr"
    options = ["--model", str(tiny_model), "--decode-tp", "2", "--max-tokens", "400", "--prompt", "Where are we?"]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*DEMO, *options], stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
    try:
        assert _until(lambda: len(_session(process.pid)) >= 4, 100), log.read_text()
        yield process, log
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "decoding"])
def test_ctrl_c_leaves_nothing(running: Any, moment: str) -> None:
    process, log = running
    if moment == "decoding":
        assert _until(lambda: b"prompt 1 of 1" in log.read_bytes(), 150), log.read_text()
    before = _shared_memory()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    # a shell shows 130 for both: an interrupt inside exec(), as in a dataclass being imported, makes CPython die by the
    # signal itself once it has finished, although main() has caught it and returned 130
    assert process.wait(20) in (130, -signal.SIGINT)
    assert _until(lambda: not _session(process.pid), 5)
    assert _until(lambda: not _left_behind(before), 5), _left_behind(before)
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_workers_die_with_a_killed_demo(running: Any) -> None:
    process, _ = running
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert _until(lambda: not _session(process.pid), 5), _session(process.pid)


def _session(leader: int) -> list[int]:
    """Live processes of the session that `leader` started; zombies are not among them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _left_behind(before: set[str]) -> set[str]:
    """New names that no living process has mapped: those of other programs here are in use."""
    new = _shared_memory() - before
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        new = {name for name in new if f"/dev/shm/{name}" not in text}
    return new & _shared_memory()


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--prefill-tp", "3", "--decode-tp", "1", "--transport", "shm", "--decode-page-tokens", "8"],
        ["--decode-tp", "1", "--transport", "process_vm", "--prefill-layout", "nhd", "--decode-layout", "hnd"],
        ["--transport", "tcp", "--prefill-page-tokens", "6", "--decode-page-tokens", "4", "--prefill-layout", "hnd"],
    ],
    ids=["defaults", "3-1 shm 16-8", "1-1 process_vm nhd-hnd", "1-3 tcp 6-4 hnd-nhd"],
)
def test_the_real_model(options: list[str]) -> None:
    done = demo(*options, timeout_s=380)
    assert done.returncode == 0, done.stderr
    assert "tokens equal: 3/3" in done.stdout
    assert "Paris" in done.stdout
