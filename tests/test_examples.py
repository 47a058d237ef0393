"""The programs in examples/ run and say that it worked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.layout.document import Instance
from kvferry.layout.presets import uniform_instance
from kvferry.layout.validate import parse_instance

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_move_moves_every_wanted_byte(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "move.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "32768 bytes left worker 0, 16384 and 16384 arrived",
        "tokens 8 … 39 are the same on both sides",
    ]


def on_devices(instance: Instance) -> Instance:
    """The same, with each worker's memory on a device of its own."""
    replace = msgspec.structs.replace
    workers = tuple(
        replace(worker, regions=tuple(replace(r, memory="device", device=worker.rank) for r in worker.regions))
        for worker in instance.workers
    )
    return replace(instance, workers=workers)


@pytest.mark.parametrize(
    ("name", "tp", "page_tokens", "layout", "pages", "bases"),
    [
        ("prefill", 1, 16, "nhd", 8, [0xFFFF81AB54E01000]),
        ("decode", 2, 8, "hnd", 16, [0xFFFF81AB60000000, 0xFFFF81AB60100000]),
    ],
)
def test_presets_make_the_documents(
    name: str, tp: int, page_tokens: int, layout: str, pages: int, bases: list[int]
) -> None:
    preset = uniform_instance(
        f"{name}-0", 4, 4, 16, tp,
        page_tokens=page_tokens, layout=layout, pages=pages, bases=bases,
        packing="one_tensor", model="example/llama-4-layers",
    )  # fmt: skip
    assert parse_instance((EXAMPLES / f"{name}.json").read_bytes()) == on_devices(preset)
