"""The programs in examples/ run and say that it worked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_move_moves_every_wanted_byte(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "move.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "32768 bytes left worker 0, 16384 and 16384 arrived",
        "tokens 8 … 39 are the same on both sides",
    ]
