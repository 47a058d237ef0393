"""`kvferry trace` and `kvferry metrics`, as an operator uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.errors import TransferTimeout
from kvferry.observe.reach import ask_all
from kvferry.observe.records import Wait, short
from tests.observe.duo import Duo, free_port, samples
from tests.session.crew import Crew, every, open_pair, start
from tests.session.pools import Shape

Open = Callable[..., Duo]


def test_a_finished_request_is_told_across_workers(duo: Open, capsys: pytest.CaptureFixture[str]) -> None:
    pair = duo()
    report = pair.move("engine/cmpl-17-0", tokens=40)
    assert main(["trace", "cmpl-17"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("transfer engine/cmpl-17-0\n")
    assert f"{pair.decode_name}/0 (target) done" in text
    assert f"{report.chunks}/{report.chunks}" in text
    brief = len(text.splitlines())
    assert main(["trace", "cmpl-17", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= brief
    assert main(["trace", "cmpl-17", "--json"]) == 0
    (story,) = json.loads(capsys.readouterr().out)["stories"]
    assert {side["state"] for side in story["sides"]} == {"done"}
    assert {side["flows"][0]["moved_bytes"] for side in story["sides"]} == {report.bytes}


def test_several_that_fit_are_listed(duo: Open, capsys: pytest.CaptureFixture[str]) -> None:
    pair = duo()
    for number in range(2):
        pair.move(f"cmpl-9-{number}")
    assert main(["trace", "cmpl-9"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 transfers fit; name one of them:")
    assert "cmpl-9-0" in text
    assert "cmpl-9-1" in text


def test_exit_codes_are_for_scripts(duo: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = duo()
    assert main(["trace", "nobody"]) == 1
    said = capsys.readouterr()
    assert (said.out, "no transfer or request is called 'nobody'" in said.err) == ("", True)
    assert f"{pair.decode_name}/0" in said.err
    bad = tmp_path / "bad.jsonl"
    bad.write_text("junk\n")
    assert main(["trace", "x", str(bad)]) == 2
    assert f"{bad}: line 1" in capsys.readouterr().err
    assert main(["trace", "x", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit) as usage:
        main(["trace", "--nonsense"])
    assert usage.value.code == 2


def test_what_runs_is_listed_with_what_it_waits_for(duo: Open, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 0
    assert capsys.readouterr().out == "nothing runs; 0 workers asked\n"
    pair = duo()
    pair.decode.receive("early", pair.prefill_name, [0], 0, (0, 4), 20.0)
    _until(lambda: all(any(state.phase == "matching" for state in log.states) for log in pair.logs()))
    assert main(["trace"]) == 0
    text = capsys.readouterr().out
    assert f"for ready, which comes after its send() from {pair.prefill_name}/0" in text
    assert f"this side's own send(); {pair.decode_name}/0 has asked" in text
    pair.decode.abort("early", "enough")
    with pytest.raises(Exception, match="enough"):
        pair.decode.wait("early")


def test_the_story_of_a_failure_outlives_its_workers(
    duo: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the files that a failure left (KVFERRY_TRACE), and from logs that were saved on another host."""
    monkeypatch.setenv("KVFERRY_TRACE", str(tmp_path / "failures"))
    pair = duo()
    pair.move("good")
    pair.decode.receive("never", pair.prefill_name, [0], 0, (0, 4), 0.2)
    with pytest.raises(TransferTimeout):
        pair.decode.wait("never")
    assert main(["trace", "good", "--save", str(tmp_path / "saved")]) == 0
    _until(lambda: bool(list((tmp_path / "failures").glob("*.jsonl"))))
    pair.close()
    capsys.readouterr()
    assert main(["trace", "never"]) == 0
    assert "failed" in capsys.readouterr().out
    assert main(["trace", "good"]) == 1  # no failure: in no file
    assert main(["trace", "good", str(tmp_path / "saved")]) == 0
    text = capsys.readouterr().out
    assert f"{pair.prefill_name}/0 (source) done" in text
    assert f"{pair.decode_name}/0 (target) done" in text


def test_metrics_of_the_host_are_printed_and_served(duo: Open, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
    assert main(["metrics"]) == 1  # nobody
    pair = duo()
    report = pair.move("t")
    capsys.readouterr()
    assert main(["metrics"]) == 0
    line = (
        f'kvferry_bytes_total{{role="target",staged="yes",way="",worker="{pair.decode_name}/0"}} {float(report.bytes)}'
    )
    assert line in capsys.readouterr().out
    port = free_port()
    command = [sys.executable, "-m", "kvferry.cli.main", "metrics", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == f"metrics at http://127.0.0.1:{port}/metrics\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert line in answer.read().decode()
        serving.send_signal(signal.SIGINT)
        assert serving.wait(10) == 130


@pytest.mark.slow
def test_a_stuck_transfer_is_seen_within_two_seconds(
    crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes; one of two prefill workers is stopped in the middle of a transfer."""
    pair = open_pair(crew, registry, Shape(tp=2), Shape(page_tokens=6), slot_bytes=64)
    every(pair.sources, "slow", 0.05)
    start(pair, "stuck-1", (0, 30), timeout_s=60)
    peer = f"{pair.source}/1"
    _until(lambda: any(wait.what.startswith("done") for wait in _waits(peer)))
    pair.sources[1].signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        _until(lambda: any(wait.since_s > 1 for wait in _waits(peer)) and _waiting_s(peer) > 1)
        seen_s = time.monotonic() - stopped_s
        assert main(["trace", "stuck-1"]) == 0
        text = capsys.readouterr().out
        assert main(["trace"]) == 0
        listed = capsys.readouterr().out
        _until(lambda: _silent() == 1)
    finally:
        pair.sources[1].signal(signal.SIGCONT)
    assert seen_s < 2
    assert f"from {peer}, no word from it for" in text
    assert f"{peer}, which takes part: process {pair.sources[1].process.pid} does not answer: it is stopped" in text
    assert "running  moving" in text
    assert peer in listed
    every(pair.targets, "wait", "stuck-1")


def _waits(peer: str) -> list[Wait]:
    logs = ask_all(Path(os.environ["KVFERRY_RUN"]), records=False).logs
    waits = [w for log in logs for s in log.states if (s.role, s.phase) == ("target", "moving") for w in s.waits]
    return [wait for wait in waits if short(wait.peer) == peer]


def _waiting_s(peer: str) -> float:
    logs = ask_all(Path(os.environ["KVFERRY_RUN"]), records=False).logs
    found = [samples(log, "kvferry_transfer_waiting_seconds") for log in logs]
    return max((one.get(("target", "moving", peer), 0.0) for one in found), default=0.0)


def _silent() -> float:
    logs = ask_all(Path(os.environ["KVFERRY_RUN"]), records=False).logs
    return sum(
        samples(log, "kvferry_peers").get(("silent",), 0.0) for log in logs if log.head.instance.startswith("decode")
    )


def _until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)
