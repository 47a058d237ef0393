"""`kvferry verify` says good where every byte is right, and names group, layer, ranks and token where one is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from kvferry.cli.main import main
from kvferry.cli.verify.cases import KINDS, Case, make_cases, rooms
from kvferry.cli.verify.cells import cells_of, pattern
from kvferry.cli.verify.drive import Driver, Verdict, Wrong
from kvferry.cli.verify.memory import SparseMemory
from kvferry.cli.verify.models import made_up, parse_spec, read_side
from kvferry.cli.verify.node import Node
from kvferry.cli.verify.report import as_text
from kvferry.cli.verify.synthetic import Synthetic
from kvferry.engines.dump import Dump
from kvferry.errors import DocumentError, IncompatibleError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance, Region, Worker, encode_json
from kvferry.layout.request import Request
from kvferry.layout.validate import check_request
from kvferry.session.keys import Access, make_keys
from kvferry.session.registry import RegistryServer
from tests.plan import oracle

COMMAND = [sys.executable, "-m", "kvferry.cli.main", "verify"]
SMALL = "tp=2,pages=24,page=4"


class Flipping(Node):
    """One byte of each chunk is wrong when it has been scattered."""

    flipped: ClassVar[list[Address]] = []

    def make(self, *arguments: Any) -> Synthetic:
        made = super().make(*arguments)
        honest = made.memory.host.scatter

        def scatter(copies: Any, chunk: Any) -> None:
            honest(copies, chunk)
            self.flipped.append(copies.addresses.first())
            made.memory.host.view(self.flipped[-1], 1)[0] ^= 1

        made.memory.host.scatter = scatter  # type: ignore[method-assign]
        return made


class Straying(Node):
    """One byte beside what was wanted is written: the last one of the first region, of a page that no case uses."""

    def make(self, *arguments: Any) -> Synthetic:
        made = super().make(*arguments)
        honest = made.memory.host.scatter
        region = made.truth.regions[0]

        def scatter(copies: Any, chunk: Any) -> None:
            honest(copies, chunk)
            made.memory.host.view(region.base.plus(region.bytes - 1), 1)[0] = 7

        made.memory.host.scatter = scatter  # type: ignore[method-assign]
        return made


class Lying(Node):
    """Its document says tokens before heads, its pages have heads before tokens."""

    def make(self, document: Instance, rank: int, *more: Any) -> Synthetic:
        made = super().make(document, rank, *more)
        made.truth = made_up("attention", f"{SMALL},layout=hnd", "x").worker(rank)
        return made


class Failing(Node):
    """It can't read its own pages."""

    def make(self, *arguments: Any) -> Synthetic:
        made = super().make(*arguments)

        def gather(copies: Any, out: Any) -> None:
            raise DocumentError("memory", "it can't be read")

        made.memory.host.gather = gather  # type: ignore[method-assign]
        return made


@contextmanager
def nodes(document: Instance, name: str, url: str, kind: type[Node] = Node, only: int = -1) -> Iterator[None]:
    """The workers of one side, in this process; the one of rank `only`, or all, of the given kind."""
    started = []
    try:
        for worker in document.workers:
            node = kind() if only in (-1, worker.rank) else Node()
            node.start(document, worker.rank, len(document.workers), name, url, {})
            started.append(node)
        yield
    finally:
        for node in started:
            node.stop()


def verify(
    source: Instance, target: Instance, kind: type[Node] = Node, only: int = -1, bad_source: bool = False
) -> Verdict:
    kinds = ((kind, only), (Node, -1)) if bad_source else ((Node, -1), (kind, only))
    with (
        RegistryServer() as server,
        nodes(source, "prefill", server.url, *kinds[0]),
        nodes(target, "decode", server.url, *kinds[1]),
    ):
        driver = Driver(server.url, Access("127.0.0.1"), timeout_s=20.0)
        try:
            return driver.verify("prefill", "decode", 10.0, 0, lambda _: None)
        finally:
            driver.close()


def attention(spec: str, name: str) -> Instance:
    return made_up("attention", spec, name)


# verdicts


def test_what_is_right_is_good() -> None:
    found = verify(attention(SMALL, "p"), attention("tp=3,pages=24,page=6,layout=hnd", "d"))
    assert found.good
    assert {pair.group for pair in found.pairs.values()} == {"full", "sliding"}
    assert {(pair.source, pair.target) for pair in found.pairs.values()} == {(0, 0), (0, 1), (1, 1), (1, 2)}
    assert all(pair.via == "shm" and pair.bytes and not pair.wrong_bytes for pair in found.pairs.values())
    text = as_text(found, colour=False)
    assert "guards: nothing was written beside what was wanted" in text
    assert text.splitlines()[-1] == f"good: 8 of 8 right, {found.cases} transfers"


def test_a_flipped_byte_is_named() -> None:
    source, target = attention(SMALL, "p"), attention("tp=1,pages=24,page=6", "d")
    Flipping.flipped.clear()
    found = verify(source, target, Flipping)
    assert not found.good
    first = found.pairs["full", 1, 0].first
    assert first is not None
    assert place(make_cases(source, target), target, "full", first) in Flipping.flipped
    fault = first.fault
    where = f"layer {fault.layer}, part {fault.part}, token {fault.token}, head {fault.axes['head']}, dim "
    text = as_text(found, colour=True)
    assert f"group full, source rank 1 to target rank 0: first wrong in {where}" in text
    assert int(fault.found, 16) ^ int(fault.expected, 16) in (1, 1 << 8)  # one bit of either byte
    assert "\x1b[31mWRONG: let no traffic in\x1b[0m: 0 of 4 right" in text


def place(cases: list[Case], target: Instance, name: str, wrong: Wrong) -> Address:
    """Where the cell that was named lies in the memory of rank 0."""
    case = next(case for case in cases if (case.name, case.groups) == (wrong.case, (name,)))
    fault, group, worker = wrong.fault, target.group(name), target.worker(0)
    pool = next(pool for pool in worker.pools if pool.group == name)
    buffer = next(one for one in pool.buffers if (one.layer, one.part) == (fault.layer, fault.part))
    cells = cells_of(pool, group, case.target.tables[pool.table_name], (fault.token, fault.token + 1))
    at = tuple(int(np.flatnonzero(held == fault.axes[axis])[0]) for axis, held in zip(group.axes, cells.indices))
    return worker.regions[buffer.region].base.plus(buffer.offset_bytes + int(cells.offsets[(0, *at)]))


@pytest.mark.slow
def test_only_the_rank_that_is_wrong_is_red() -> None:
    found = verify(attention("tp=1,pages=24", "p"), attention(SMALL, "d"), Flipping, only=1)
    assert {pair.target: pair.good for pair in found.pairs.values()} == {0: True, 1: False}


def test_a_target_whose_layout_is_wrong_is_named() -> None:
    found = verify(attention("tp=1,pages=24", "p"), attention(SMALL, "d"), Lying, only=0)
    assert {pair.target for pair in found.pairs.values() if not pair.good} == {0}
    pair = found.pairs["sliding", 0, 0]
    assert pair.first is not None and pair.first.fault.layer == 1 and pair.first.fault.token < 4
    assert found.fences[1].stray_bytes == 0


@pytest.mark.slow
def test_a_source_whose_layout_is_wrong_is_named() -> None:
    found = verify(attention(SMALL, "p"), attention("tp=1,pages=24", "d"), Lying, only=1, bad_source=True)
    assert {pair.source for pair in found.pairs.values() if not pair.good} == {1}
    assert found.pairs["full", 1, 0].wrong_bytes > 0


def test_a_byte_beside_what_was_wanted_is_named() -> None:
    found = verify(attention("tp=1,pages=24", "p"), attention("tp=1,pages=24", "d"), Straying)
    fence = found.fences[0]
    assert all(pair.good for pair in found.pairs.values()) and not found.good
    assert fence.stray_bytes == fence.cases
    assert "group full, layer 0, part k, page 23 (region 0, byte" in fence.where
    assert "guards of target rank 0" in as_text(found, colour=False)


@pytest.mark.slow
def test_a_transfer_that_fails_is_a_verdict_too() -> None:
    found = verify(attention("tp=1,pages=24", "p"), attention("tp=1,pages=24", "d"), Failing, bad_source=True)
    assert not found.good
    assert all("it can't be read" in pair.problem for pair in found.pairs.values())
    assert "failed" in as_text(found, colour=False)


def test_two_that_do_not_fit_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="model: source has 'attention', target has 'latent'"):
        verify(made_up("attention", SMALL, "p"), made_up("latent", SMALL, "d"))


# what it moves


@pytest.mark.parametrize("model", ["all", "attention", "latent", "hybrid"])
@pytest.mark.parametrize(
    ("prefill", "decode"), [("tp=1", "tp=2,page=32"), ("tp=3,cp=2,page=12", "tp=2,pp=2,layout=hnd"),
                            ("tp=1,pages=3", "tp=1,cp=4,pages=2,page=8")]
)  # fmt: skip
def test_every_case_is_a_request_that_can_be_served(model: str, prefill: str, decode: str) -> None:
    source, target = made_up(model, prefill, "p"), made_up(model, decode, "d")
    cases = make_cases(source, target)
    assert {case.name for case in cases} == {kind.name for kind in KINDS}
    assert {name for case in cases for name in case.groups} == {group.name for group in source.groups}
    for case in cases:
        check_request(Request("kvferry-request/1", case.wanted, case.source, case.target), source, target)


def test_cases_differ_in_pages_and_start_in_the_middle_of_them() -> None:
    source, target = attention("tp=1,page=16", "p"), attention("tp=1,page=32", "d")
    full = {case.name: case for case in make_cases(source, target) if case.groups == ("full",)}
    pages = {name: case.source.tables["full"].pages for name, case in full.items()}
    assert pages["pages in order"] == tuple(sorted(pages["pages in order"]))  # type: ignore[type-var]
    assert pages["pages at random"] != tuple(sorted(pages["pages at random"]))  # type: ignore[type-var]
    far = full["pages reversed, far apart"].target.tables["full"].pages
    assert max(far) - min(far) > 1000  # type: ignore[type-var,operator]
    assert pages["a window"][0] is None
    start = full["after a prefix hit"].wanted["full"].token_range[0]
    assert start % 16 and start % 32 and full["after a prefix hit"].target.tables["full"].start == start // 32 * 32
    assert full["pages at random"].wanted["full"].token_range[1] % 16


def test_layers_of_a_group_may_have_tables_of_their_own() -> None:
    document = attention("tp=1,pages=30", "p")
    pool = document.workers[0].pools[0]
    first, second = (msgspec.structs.replace(pool, buffers=pool.buffers[i : i + 2], table=f"t{i}") for i in (0, 2))
    pools = (first, second, *document.workers[0].pools[1:])
    document = msgspec.structs.replace(document, workers=(msgspec.structs.replace(document.workers[0], pools=pools),))
    for case in make_cases(document, document):
        assert ("t0" in case.source.tables) == ("t2" in case.target.tables) == (pool.group in case.groups)
        check_request(Request("kvferry-request/1", case.wanted, case.source, case.target), document, document)


def test_page_tables_never_share_a_page() -> None:
    pages = [set(room.pages) for room in rooms(made_up("all", "tp=1,pages=30", "p")).values()]
    assert sum(map(len, pages)) == len(set().union(*pages))


@pytest.mark.parametrize("model", ["attention", "latent", "hybrid"])
@pytest.mark.parametrize(
    "spec", ["tp=3,pages=9,page=4", "tp=1,cp=2,pages=9,page=4,layout=hnd", "tp=2,engine=vllm,pages=9"]
)
def test_cells_lie_where_the_oracle_says(model: str, spec: str) -> None:
    """The oracle of the planner's tests, which shares no code with this either."""
    document = made_up(model, spec, "p")
    plain = json.loads(encode_json(document))
    case = next(case for case in make_cases(document, document) if case.name == "pages at random")
    side = json.loads(encode_json(case.target))
    for worker in document.workers[-1:]:
        for pool in worker.pools:
            group = document.group(pool.group)
            start, stop = case.wanted[group.name].token_range
            if start == stop:
                continue
            table = case.target.tables[pool.table_name]
            cells = cells_of(pool, group, table, (start, min(stop, start + 5)))
            mine = {
                (worker.regions[buffer.region].base.plus(buffer.offset_bytes + int(offset))).value
                for buffer in pool.buffers[:2]
                for offset in cells.offsets[..., :3].ravel()
            }
            plain_worker = next(one for one in plain["workers"] if one["rank"] == worker.rank)
            tagged = oracle.tagged(plain, plain_worker, side, group.name, range(start, min(stop, start + 5)))
            wanted = {(buffer.layer, buffer.part) for buffer in pool.buffers[:2]}
            last = {int(index) for index in cells.indices[-1][:3]}
            theirs = {
                address for address, tags in tagged if (tags[0][1], tags[0][2]) in wanted and tags[0][4][-1] in last
            }
            assert mine == theirs and mine


def test_patterns_have_no_zero_and_tell_cells_apart() -> None:
    document = made_up("all", "tp=1", "p")
    case = make_cases(document, document)[-1]
    seen: set[bytes] = set()
    count = 0
    for pool in document.workers[0].pools:
        group = document.group(pool.group)
        cells = cells_of(pool, group, case.source.tables[pool.table_name], case.wanted[group.name].token_range)
        for buffer in pool.buffers[:4]:
            values = pattern(group, buffer.layer, buffer.part, cells, 3)
            assert values.min() > 0
            rows = values.reshape(values.shape[0], -1)
            if rows.shape[1] >= 16:
                seen |= {row.tobytes() for row in rows[:8]}
                count += len(rows[:8])
    assert len(seen) == count > 50


def test_memory_is_as_large_as_it_says_and_costs_what_is_touched() -> None:
    base = Address(0xFFFF_8000_0000_0000)
    regions = (Region(base, 1 << 40), Region(base.plus(1 << 30), 1 << 12))  # the second lies within the first
    memory = SparseMemory(Worker(0, regions, ()))
    memory.write(0, np.array([5, 1 << 39]), np.array([[1, 2], [3, 4]], np.uint8), 2)
    memory.write(1, np.array([0]), 9, 1)
    assert memory.read(0, np.array([1 << 30]), 1).tolist() == [[9]]
    assert memory.read(0, np.array([5]), 2).tolist() == [[1, 2]]
    assert list(memory.stray()) == [(0, 5), (0, 6), (0, 1 << 30), (0, 1 << 39), (0, (1 << 39) + 1)]
    memory.clear()
    assert not list(memory.stray())
    memory.close()


# the command


@pytest.mark.parametrize("spec", ["0", "tp=0", "tp=x", "pp=2,layout=abc", "engine=none", "", "heads=3"])
def test_what_no_side_can_be_is_said(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--prefill", spec]) == 2
    assert "--prefill, --decode: expected TP or some of tp=N, pp=N" in capsys.readouterr().err
    assert parse_spec("3")[1].tp == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "nothing"], "expected one of all, attention, latent, hybrid, or a config.json"),
        (["prefill"], "expected two sides or none, got 1"),
        (["prefill", "decode"], "no such file; for a side that waits on another host say --registry URL"),
        (["worker"], "expected one file or folder: kvferry verify worker FILE"),
        (["--host", "10.1.2.3"], "only loopback (127.0.0.1) can be used without keys"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_HOST", "127.0.0.1")  # restored afterwards
    assert main(["verify", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_nobody_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with RegistryServer() as server:
        assert main(["verify", "--registry", server.url, "--wait", "0.1", "prefill", "decode"]) == 2
    problem = capsys.readouterr().err
    assert "no workers named 'prefill' wait at" in problem
    assert f"kvferry verify worker FILE --name prefill --registry {server.url}" in problem


def test_a_side_is_a_document_or_what_an_engine_dumped(tmp_path: Path) -> None:
    whole = attention(SMALL, "p")
    (tmp_path / "instance.json").write_bytes(encode_json(whole))
    folder = tmp_path / "dumps"
    folder.mkdir()
    for worker in whole.workers:
        layout = msgspec.structs.replace(whole, workers=(worker,))
        dump = Dump("kvferry-dump/1", "vllm", "0.32", worker.rank, (), layout)
        (folder / f"{worker.rank}.json").write_bytes(encode_json(dump))
    assert read_side(tmp_path / "instance.json") == read_side(folder) == whole
    assert [worker.rank for worker in read_side(folder / "1.json").workers] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "process_vm", "tcp"])
def test_two_instances_of_its_own(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prefill", "tp=2,page=16", "--decode", "tp=3,page=24,layout=hnd", "--mib", "4"]
    assert main(["verify", "--json", "--transport", transport, *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "kvferry-verify/1" and found["good"]
    assert {pair["via"] for pair in found["pairs"]} == {transport}
    groups = {"full", "sliding", "latent", "index", "index_scale", "attn", "conv", "ssm"}
    assert {pair["group"] for pair in found["pairs"]} == groups
    assert all(pair["bytes"] > 0 and pair["wrong_bytes"] == 0 for pair in found["pairs"])
    assert found["speed"]["bytes"] > 0 and found["speed"]["seconds"] > 0


@pytest.mark.slow
def test_two_hosts_two_commands(tmp_path: Path) -> None:
    """Two processes with keys and different addresses of this machine stand in for the hosts."""
    make_keys(tmp_path / "keys", "all")
    for name, spec in (("prefill", "tp=2"), ("decode", "tp=1,page=32")):
        (tmp_path / f"{name}.json").write_bytes(encode_json(attention(spec, name)))
    keys = ["--keys", str(tmp_path / "keys")]
    waiting = [*COMMAND, "worker", str(tmp_path / "prefill.json"), *keys, "--host", "127.0.0.2"]
    with subprocess.Popen(waiting, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            line = worker.stdout.readline()
            assert line.startswith(
                "2 worker(s) of 'prefill' wait; on the other host: kvferry verify --registry http://"
            )
            url = line.split("--registry ")[1].split()[0]
            assert url.startswith("http://127.0.0.2:")
            driver = [*COMMAND, "--registry", url, "prefill", str(tmp_path / "decode.json"), *keys, "--mib", "0"]
            for _ in range(2):  # and again: the workers go on waiting
                done = subprocess.run([*driver, "--host", "127.0.0.3"], capture_output=True, text=True, timeout=100)
                assert done.returncode == 0, done.stderr
                assert done.stdout.splitlines()[-1].startswith("good: 4 of 4 right")
        finally:
            worker.terminate()


@pytest.mark.slow
def test_a_side_on_two_hosts(tmp_path: Path) -> None:
    """Each host has the dumps of its own ranks only."""
    whole = attention("tp=2", "prefill")
    for worker in whole.workers:
        part = msgspec.structs.replace(whole, workers=(worker,))
        (tmp_path / f"{worker.rank}.json").write_bytes(encode_json(part))
    (tmp_path / "decode.json").write_bytes(encode_json(attention("tp=1", "decode")))
    with RegistryServer() as server:
        hosts = [
            subprocess.Popen(
                [*COMMAND, "worker", str(tmp_path / f"{rank}.json"), "--world", "2", "--registry", server.url],
                stdout=subprocess.DEVNULL,
            )
            for rank in (0, 1)
        ]
        try:
            driver = [*COMMAND, "--registry", server.url, "prefill", str(tmp_path / "decode.json"), "--mib", "0"]
            done = subprocess.run(driver, capture_output=True, text=True, timeout=100)
        finally:
            for host in hosts:
                host.terminate()
                host.wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("good: 4 of 4 right")
