"""`kvferry soak`: good where nothing is wrong, and not where something was planted."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.soak import add_arguments, run
from kvferry.cli.soak.faults import Fault, Faults
from kvferry.cli.soak.fleet import make_deployment
from kvferry.cli.soak.load import SHAPES, SOURCES, Load
from kvferry.cli.soak.pool import Shape, WorkerPool
from kvferry.cli.soak.worker import Worker
from kvferry.session.keys import read_keys
from tests.cli import planted

COMMAND = [sys.executable, "-m", "kvferry.cli.main", "soak"]


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture
def soak(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def soaked(make: Callable[[], Worker], *given: str) -> tuple[int, dict[str, Any]]:
        code = run(options("--json", *given), make)
        return code, json.loads(capsys.readouterr().out)

    return soaked


@pytest.mark.parametrize("given", [("auto",), ("tcp", "--keys")], ids=["auto", "tcp with keys"])
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(240)
def test_a_short_run_is_good(given: tuple[str, ...], soak: Callable[..., Any]) -> None:
    code, report = soak(Worker, "--minutes", "0.4", "--seed", "7", "--transport", *given)
    print(json.dumps(report, indent=1))
    assert code == 0, report["problems"]
    assert report["format"] == "kvferry-soak/1" and report["good"]
    assert report["keys"] == ("--keys" in given)
    assert report["requests"]["done"] > 10 and sum(report["faults"].values()) > 3
    nothing = ("wrong_bytes", "hung", "unexplained", "pages_held", "slots_held")
    assert [report[name] for name in nothing] == [0] * 5
    assert {process["name"] for process in report["processes"]} >= {"registry", "decode/0", "decode/1", "decode/2"}


@pytest.mark.parametrize(
    ("make", "words", "field"),
    [
        (planted.FlipsAByte, "wrong bytes in the pages of request-", "wrong_bytes"),
        (planted.ScribblesLater, "wrong bytes in its memory", "wrong_bytes"),
        (planted.LeaksASlot, "still holds", "slots_held"),
        (planted.FailsWithoutReason, "failed: transfer", ""),
        (planted.Complains, "has logged an error: a job failed without an answer: ZeroDivisionError", ""),
    ],
)
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(240)
def test_what_is_planted_is_found(make: type[Worker], words: str, field: str, soak: Callable[..., Any]) -> None:
    code, report = soak(make, "--minutes", "0.12", "--seed", "3")
    assert code == 1 and not report["good"]
    assert any(words in problem for problem in report["problems"]), report["problems"]
    assert not field or report[field] > 0


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_the_report_so_far(number: signal.Signals) -> None:
    started = subprocess.Popen(
        [*COMMAND, "--minutes", "30", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    try:
        while "requests" not in started.stderr.readline():
            pass
        time.sleep(2.0)
        children = _children(started.pid)
        os.kill(started.pid, number)
        out, _ = started.communicate(timeout=120)
        time.sleep(0.5)  # multiprocessing's own helper ends a moment after us
    finally:
        started.kill()
    report = json.loads(out)
    assert started.returncode == 130, report["problems"]
    assert report["interrupted"] and report["good"]
    assert len(children) >= 7 and not any(map(_runs, children))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("given", [("--minutes", "0"), ("--minutes", "x"), ("--transport", "pigeon")])
def test_bad_options_end_with_one_line(given: tuple[str, ...]) -> None:
    ended = subprocess.run([*COMMAND, *given], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr and given[0] in ended.stderr


# its parts


def test_members_of_its_deployment_know_each_other_and_have_keys_of_their_own(tmp_path: Path) -> None:
    folders = make_deployment(tmp_path, ["registry", "prefill-a/0", "decode/0", "decode/1"])
    keys = [read_keys(folder) for folder in folders.values()]
    assert len({one.public for one in keys}) == 4 and len({one.registry for one in keys}) == 1
    assert all(one.allowed == {other.public for other in keys} for one in keys)


class NoFleet:
    """Faults that are only looked at need no processes."""

    seats: tuple[()] = ()


def test_a_failure_is_explained_by_what_was_done_to_its_instances_at_that_time_only() -> None:
    faults = Faults(random.Random(1), NoFleet(), 0.0)  # type: ignore[arg-type]
    seat = object()
    faults.log = [
        Fault("kill", "prefill-a", 10.0, seat, 11.0, 11.0),  # type: ignore[arg-type]
        Fault("pause", "registry", 40.0, seat, 41.0, None),  # type: ignore[arg-type]
    ]
    assert faults.explain("prefill-a", "decode", 9.0, 10.5)
    assert faults.explain("prefill-a", "decode", 12.0, 15.0), "a moment later"
    assert not faults.explain("prefill-b", "decode", 9.0, 10.5), "one dead peer delays nobody else"
    assert not faults.explain("prefill-a", "decode", 2.0, 9.0)
    assert not faults.explain("prefill-a", "decode", 15.0, 20.0)
    assert faults.explain("prefill-b", "decode", 39.0, 45.0), "the registry, which has not come back yet"


def test_a_pool_knows_contents_guards_and_pages_of_nobody() -> None:
    for layout in ("nhd", "hnd"):
        pool = WorkerPool(Shape(tp=2, page_tokens=4, layout=layout, pages=6), 1)
        pool.fill(5, [3, 1], 2, (2, 9))
        assert pool.wrong_bytes() == 0
        assert pool.wrong_bytes_of(5, [3, 1], 2, (2, 9)) == 0
        assert pool.wrong_bytes_of(6, [3, 1], 2, (2, 9)) > 1000, "another request's contents are not these"
        for place in (0, len(pool._file) // 2, -1):
            pool._file[place] ^= 1
            assert pool.wrong_bytes() == 1
            pool._file[place] ^= 1


def test_pages_are_one_requests_at_a_time() -> None:
    load = Load(random.Random(1), SHAPES)
    drawn = [request for _ in range(100) if (request := load.draw()) is not None]
    assert 8 < len(drawn) < 100, "until there are too few pages"
    for name in SHAPES:
        pages = [
            page
            for request in drawn
            for side, listed in ((request.source, request.source_pages), (request.target, request.target_pages))
            if side == name
            for page in listed
        ]
        assert len(pages) == len(set(pages))
    for request in drawn:
        assert 0 <= request.hit < request.tokens == request.steps[-1] and list(request.steps) == sorted(request.steps)
        load.give_back(request.source, request.source_pages)
        load.give_back(request.target, request.target_pages)
    assert load.pages_held() == 0
    assert {request.source for request in drawn} == set(SOURCES)
