"""`kvferry plan`: totals, `--svg` and `--why`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvferry.cli.plan import traffic_table
from kvferry.plan.explain import TrafficRow
from kvferry.transport.costs import known_costs
from tests.cli.test_plan import DECODE, PREFILL, REQUEST, changed, plan


def test_totals_per_worker(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, PREFILL, DECODE)
    assert (code, err) == (0, "")
    rows = [re.split(r" {2,}", line) for line in out.splitlines()]
    # NHD to HND: a page of 8 tokens needs 8 × 4 layers × k and v × 2 heads copies
    assert [row[9:] for row in rows[1:3]] == [["128", "gathered", "only owner", "-"]] * 2
    assert [row[:5] for row in rows[5:8]] == [
        ["0", "prefill-0 sends", "0-1", "1024", "0"],
        ["0", "decode-0 receives", "0", "512", "0"],
        ["1", "decode-0 receives", "0", "512", "0"],
    ]


def test_totals_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(plan(capsys, PREFILL, DECODE, "--json")[1])
    found = [
        [(total["rank"], total["peers"], total["bytes_per_token"]) for total in document[side]]
        for side in ("senders", "receivers")
    ]
    assert found == [[(0, [0, 1], 1024)], [(0, [0], 512), (1, [0], 512)]]


def test_replicas_cycles_and_unequal_runs_are_shown() -> None:
    row = TrafficRow(
        source=3, target=0, group="latent", layers=(0, 1, 2, 5, 7, 8), parts=("kv",), axes={}, cycles=((1, 4, 2),),
        bytes_per_token=1152, run_bytes=1152, longest_run_bytes=2304, copies_per_page=2.5, replicas=(1, 3, 5),
        choice="replica 2 of 3",
    )  # fmt: skip
    line = traffic_table([row]).splitlines()[1]
    assert re.split(r" {2,}", line) == [
        "3", "0", "latent", "0-2,5,7-8", "kv", "-", "t//2%4=1", "1152", "1152-2304", "2.5", "gathered",
        "replica 2 of 3", "1 5",
    ]  # fmt: skip


def test_the_transport_decides_what_is_gathered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"format": "kvferry-costs/1", "gather": {"run_s": 1e-6, "byte_s": 1e-9}}
    costs["ways"] = {"nixl": {"run_s": 9e-7, "byte_s": 1e-9}, "tcp": {"run_s": 0, "byte_s": 1e-9}}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    monkeypatch.setenv("KVFERRY_COSTS", str(tmp_path / "costs.json"))
    known_costs.cache_clear()
    found = {}
    for transport in ("nixl", "tcp"):
        document = json.loads(plan(capsys, PREFILL, DECODE, "--transport", transport, "--json")[1])
        (sender,) = document["senders"]
        found[transport] = ({row["posting"] for row in document["rows"]}, sender["straight_ms"], sender["gathered_ms"])
    known_costs.cache_clear()
    # 1,024 tokens: 128 pages × 128 copies to each of two targets, 1 MiB in all
    copies, nbytes = 2 * 128 * 128, 1 << 20
    straight, gathered = copies * 9e-4 + nbytes * 1e-6, copies * 1e-3 + 2 * nbytes * 1e-6
    assert found["nixl"] == ({"straight"}, pytest.approx(straight, abs=1e-3), pytest.approx(gathered + 9e-4, abs=1e-3))
    assert found["tcp"] == ({"gathered"}, None, pytest.approx(gathered, abs=1e-3))


def test_an_svg_is_written_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "map.svg"
    code, out, err = plan(capsys, PREFILL, DECODE, "--svg", file)
    assert (code, err) == (0, "") and out == plan(capsys, PREFILL, DECODE)[1]
    assert "target worker 1 receives from source workers 0" in file.read_text()


def test_what_a_request_does_not_want_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "map.svg"
    request = changed(tmp_path, REQUEST, ["groups", "attn", "tokens"], [8, 8])
    assert plan(capsys, PREFILL, DECODE, "--request", request, "--svg", file)[0] == 0
    assert "target worker 1 receives from nobody" in file.read_text()


def test_an_svg_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, PREFILL, DECODE, "--svg", tmp_path / "no" / "map.svg")
    assert (code, out, err) == (2, "", f"kvferry: error: {tmp_path / 'no' / 'map.svg'}: No such file or directory\n")


def test_why_follows_a_cell_into_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, PREFILL, DECODE, "--request", REQUEST, "--why", "1:attn:2:v:head=3,dim=5:17", "--json")
    found = json.loads(out)
    assert code == 0
    # layer 2's v starts 81,920 bytes in; page 2, slot 1, head 3 of 4, dim 5
    assert found["source"]["address"] == hex(0xFFFF81AB54E01000 + 81_920 + 2 * 2048 + 128 + 3 * 32 + 5 * 2)
    document = json.loads(plan(capsys, PREFILL, DECODE, "--request", REQUEST, "--json")[1])
    (transfer,) = [t for t in document["transfers"] if t["target"] == 1]
    run = (found["run"]["source_start"], found["run"]["target_start"], found["run"]["bytes"])
    assert run in set(zip(transfer["source_addresses"], transfer["target_addresses"], transfer["bytes"]))


def test_why_in_words_gives_offsets_without_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, PREFILL, DECODE, "--why", "1:attn:2:v:3:17")
    assert code == 0
    assert "only source worker" in out
    assert "run       32 bytes from 0xe0 in the source page to 0x120 in the target page" in out


def test_why_in_words_gives_addresses_with_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, PREFILL, DECODE, "--request", REQUEST, "--why", "1:attn:2:v:3:17")
    assert code == 0
    assert "page 2, slot 1, address 0xffff81ab54e160e0" in out
    assert "page 0, slot 1, address 0xffff81ab6010a120" in out
    assert "run       32 bytes from 0xffff81ab54e160e0 to 0xffff81ab6010a120" in out


@pytest.mark.parametrize(
    "cell", ["", "1:attn", "9:attn:0:k:2:0", "1:attn:0:k:0:0", "1:attn:0:k:dim=99:0", "1:attn:0:k:2:9x"]
)
def test_a_bad_cell_is_one_line(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, PREFILL, DECODE, "--why", cell)
    assert (code, out) == (2, "")
    assert err.startswith("kvferry: error: --why: ") and err.count("\n") == 1
