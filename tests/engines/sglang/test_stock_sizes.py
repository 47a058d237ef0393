"""What docs/comparison.md says of SGLang's own connector is what its code answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(300)]


def test_the_page_shows_what_the_engines_own_code_answers() -> None:
    page = (ROOT / "docs/comparison.md").read_text()
    shown = page.partition("scripts/stock_sizes.py sglang\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/stock_sizes.py", "sglang"],
        capture_output=True, text=True, timeout=280, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(shown), done.stdout
