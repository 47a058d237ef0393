"""Dumps of an engine's workers: written, shown, and merged into a document that `kvferry plan` takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.cli import main as cli
from kvferry.engines.dump import write_dump
from kvferry.errors import EngineError
from kvferry.layout.document import Group, Instance, Worker
from kvferry.layout.tensors import pool_of
from kvferry.layout.validate import parse_instance

GROUP = Group("attn", "token", "float32", (0, 1), ("k",), {"head": 4, "dim": 8})


def dump(folder: Path, rank: int, name: str = "org/prefill 1") -> Path:
    tensors = {f"model.layers.{i}": np.zeros((6, 2, 16, 8), np.float32) for i in (0, 1)}
    regions, pools = zip(
        *(
            pool_of(
                tensor,
                ("page", "head", "token", "dim"),
                GROUP,
                layers=(layer,),
                parts=("k",),
                owned={"head": [(2 * rank, 2 * rank + 2)]},
                region=layer,
            )
            for layer, tensor in enumerate(tensors.values())
        )
    )
    worker = Worker(rank, regions, pools)
    return write_dump(
        folder, "vllm", "1.2", Instance("kvferry-instance/1", name, "m", (GROUP,), (worker,)), rank, tensors
    )


def test_shown_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(dump(tmp_path / "new", rank)) for rank in (1, 0)]
    assert [Path(file).name for file in files] == ["vllm-org_prefill_1-1.json", "vllm-org_prefill_1-0.json"]
    assert cli.main(["layout", "--from-dump", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "org/prefill 1: vllm 1.2, model m",
        "group attn: float32, layers 0–1, k, head 4 × dim 8",
    ]
    start = lines.index("worker 1")
    assert lines[start:] == [
        "worker 1",
        "  registered by the engine:",
        "    model.layers.0 … model.layers.1 (2): float32 [6, 2, 16, 8], strides [256, 128, 8, 1]",
        "  read as:",
        "    attn, layers 0, k: 6 pages of 16 tokens, 1024 B apart, table attn",
        "      in a page: head × 2 every 512 B > token × 16 every 32 B > dim × 8 every 4 B",
        "      owns head [2, 4)",
        "    attn, layers 1, k: 6 pages of 16 tokens, 1024 B apart, table attn",
        "      in a page: head × 2 every 512 B > token × 16 every 32 B > dim × 8 every 4 B",
        "      owns head [2, 4)",
    ]


def test_merged_into_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(dump(tmp_path, rank)) for rank in (0, 1)]
    assert cli.main(["layout", "--json", "--from-dump", *files]) == 0
    instance = parse_instance(capsys.readouterr().out)
    assert [worker.rank for worker in instance.workers] == [0, 1]
    out = tmp_path / "instance.json"
    assert cli.main(["layout", "--out", str(out), "--from-dump", *files]) == 0
    assert parse_instance(out.read_bytes()) == instance


def test_bad_dumps_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = dump(tmp_path, 0), dump(tmp_path, 1, name="another")
    junk = tmp_path / "junk.json"
    junk.write_text('{"format": "kvferry-dump/2"}')
    for arguments, problem in [
        ([one, other], "instance: the dumps of ranks 0 and 1 are of two instances"),
        ([one, one], "rank"),
        ([junk], f"{junk}: format"),
        ([tmp_path / "absent.json"], "No such file"),
    ]:
        assert cli.main(["layout", "--from-dump", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line
    assert cli.main(["layout"]) == 2
    assert "or --from-dump FILE" in capsys.readouterr().err
    assert cli.main(["layout", str(junk), "--from-dump", str(one)]) == 2
    assert "leave out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"KVFERRY_DUMP: .*can't be written"):
        dump(tmp_path / "file", 0)
