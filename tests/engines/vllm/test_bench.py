"""scripts/bench_vllm.py, small: stock and ours side by side in one run, every byte compared. It shows that all ways
work and are measured, not how fast they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.engines.vllm.servers import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]


def test_stock_and_ours_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed in this environment: the stock connector needs it")
    command = [sys.executable, str(ROOT / "scripts" / "bench_vllm.py"), "--mib", "64", "--request-mib", "16"]
    done = subprocess.run(
        [*command, "--repeat", "2", "--json"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout[done.stdout.index("[\n") :])
    measured = {(row["way"], row["decode_workers"]): row for row in rows}
    assert measured.keys() == {
        (way, tp) for way in ("stock", "ours", "ours into pages", "ours over nixl") for tp in (1, 2)
    }
    with capsys.disabled():
        for (way, tp), row in measured.items():
            stock = measured["stock", tp]
            ratios = [row[name] / stock[name] for name in ("transfer_s", "first_s")]
            print(f"\n  {way}, 1 → {tp}: {row['transfer_s'] * 1000:.1f} ms, to stock {ratios[0]:.2f}", end="")
            print(f", with handshake {ratios[1]:.2f}", end="")
    assert all(row["bytes"] == 16 << 20 and row["transfer_s"] > 0 for row in rows)
