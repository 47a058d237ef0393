"""`kvferry plan` on the documents in examples/, and on bad ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main as cli
from kvferry.layout.document import decode_json
from kvferry.plan.document import PlanDocument

EXAMPLES = Path(__file__).parents[2] / "examples"
PREFILL, DECODE, REQUEST = (EXAMPLES / f"{name}.json" for name in ("prefill", "decode", "request"))

Run = tuple[int, str, str]


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> Run:
    code = cli.main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def changed(tmp_path: Path, document: Path, path: list[Any], value: object) -> Path:
    """A copy of `document` with one field changed."""
    root = json.loads(document.read_text())
    at = root
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    copy = tmp_path / document.name
    copy.write_text(json.dumps(root))
    return copy


def test_the_table_says_who_sends_what(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, PREFILL, DECODE)
    assert (code, err) == (0, "")
    header, *rows = [[cell.strip() for cell in re.split(r" {2,}", line)] for line in out.splitlines()[:3]]
    shown = [dict(zip(header, row)) for row in rows]
    # 4 layers × k and v × 2 heads × 16 × 2 bytes; NHD to HND share the 16 numbers of a head
    same = {"from": "0", "group": "attn", "layers": "0-3", "parts": "k,v", "bytes/token": "512", "run bytes": "32"}
    assert [{name: row[name] for name in same} for row in shown] == [same, same]
    assert [(row["to"], row["axes"]) for row in shown] == [("0", "head 0:2 dim 0:16"), ("1", "head 2:4 dim 0:16")]


def test_the_table_as_json_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, PREFILL, DECODE, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [(row["source"], row["target"], row["axes"]["head"]) for row in rows] == [(0, 0, [[0, 2]]), (0, 1, [[2, 4]])]


def test_a_request_gives_a_plan_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, PREFILL, DECODE, "--request", REQUEST, "--json")
    document = decode_json(out, PlanDocument)
    assert (code, err) == (0, "")
    # tokens 8 … 39 of everything
    assert document.proof.bytes == 32 * 4 * 2 * 4 * 16 * 2 == sum(sum(t.bytes) for t in document.transfers)
    assert document.proof.copies == sum(len(t.bytes) for t in document.transfers)
    # token 8 of layer 0's k for target worker 1: slot 8 of source page 5, slot 0 of target page 1, heads 2 and 3
    first = document.transfers[1]
    pairs = dict(zip(first.target_addresses, first.source_addresses))
    source, target = 0xFFFF81AB54E01000, 0xFFFF81AB60100000
    assert pairs[hex(target + 1 * 512)] == hex(source + 5 * 2048 + 8 * 128 + 2 * 32)


def test_the_summary_of_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, PREFILL, DECODE, "--request", REQUEST)
    assert code == 0
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["from", "to", "copies", "bytes", "shortest", "longest"],
        ["0", "0", "512", "16384", "32", "32"],
        ["0", "1", "512", "16384", "32", "32"],
    ]
    assert out.splitlines()[-1] == "32768 bytes in 1024 copies; proved: in bounds, exactly once, complete"


def test_a_bad_field_is_named_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = changed(tmp_path, DECODE, ["workers", 1, "pools", 0, "modes", 1, 2], 0)
    code, out, err = plan(capsys, PREFILL, bad)
    assert (code, out) == (2, "")
    assert err == f"kvferry: error: {bad}: workers[1].pools[0].modes[1][2]: stride must be ≥ 1, got 0\n"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "{" * 10_000, '{"format": "kvferry-instance/2"}'])
def test_what_is_no_document_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(text.encode("latin-1"))
    code, out, err = plan(capsys, bad, DECODE)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvferry: error: {bad}: ")
    assert err.count("\n") == 1


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.json"
    code, out, err = plan(capsys, PREFILL, missing)
    assert (code, out, err) == (2, "", f"kvferry: error: {missing}: No such file or directory\n")


def test_two_models_are_refused_with_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = changed(tmp_path, DECODE, ["model"], "another")
    code, out, err = plan(capsys, PREFILL, other)
    assert (code, out) == (2, "")
    assert "model" in err and "'example/llama-4-layers'" in err and "'another'" in err
    assert err.count("\n") == 1


def test_a_page_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = changed(tmp_path, REQUEST, ["source", "tables", "attn", "pages", 1], None)
    code, out, err = plan(capsys, PREFILL, DECODE, "--request", request)
    assert (code, out) == (2, "")
    assert err.startswith("kvferry: error: ") and err.count("\n") == 1


def test_a_target_pool_without_buffers_wants_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = changed(tmp_path, DECODE, ["workers", 0, "pools", 0, "buffers"], [])
    code, out, err = plan(capsys, PREFILL, empty, "--request", REQUEST, "--json")
    assert (code, err) == (0, "")
    assert [transfer["target"] for transfer in json.loads(out)["transfers"]] == [1]
