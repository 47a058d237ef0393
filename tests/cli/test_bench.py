"""`kvferry bench plan` runs, and its numbers hang together. No time is asserted here: the machine is shared."""

from __future__ import annotations

import json

import pytest

from kvferry.cli.main import main


def test_bench_plan_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--json", "--repeat", "1"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["workloads"]}
    fields = {"name", "short_runs", "compile_ms", "bind_ms", "write_once_ms", "copies", "merged_copies", "peak_bytes"}
    assert all(set(row) == fields for row in rows.values())
    assert rows["Llama-70B TP4→TP8 NHD, 8,192 tokens"]["merged_copies"] == 8192 * 160
    assert rows["Llama-70B TP4→TP8 NHD, 8,192 tokens"]["short_runs"]
    assert rows["Llama-70B TP4→TP8 HND, 8,192 tokens"]["merged_copies"] == 512 * 160
    assert rows["Llama-70B TP4→TP4 NHD, contiguous pages"]["merged_copies"] == 160
    assert rows["Llama-70B PP4→PP2 NHD"]["merged_copies"] == 512 * 40
    assert rows["Llama-70B TP4→TP8 NHD, 131,072 tokens, symbolic"]["peak_bytes"] < 16_000_000


def test_bench_plan_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--repeat", "1", "--only", "MLA"]) == 0
    assert "DeepSeek-V3 MLA TP8→TP16" in capsys.readouterr().out
