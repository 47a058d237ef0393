"""The pictures are what the program draws."""

from __future__ import annotations

from pathlib import Path

from kvferry.cli import main as cli
from tests.docs.blocks import REPOSITORY

ALGEBRA = REPOSITORY / "examples" / "algebra"


def test_the_picture_is_the_programs(tmp_path: Path) -> None:
    """To renew it: `kvferry plan` with these two documents and `--svg docs/images/tp4-to-tp3.svg`."""
    drawn = tmp_path / "map.svg"
    arguments = [str(ALGEBRA / name) for name in ("tp4-page6.json", "tp3-page4.json")]
    assert cli.main(["plan", *arguments, "--svg", str(drawn)]) == 0
    assert drawn.read_text() == (REPOSITORY / "docs/images/tp4-to-tp3.svg").read_text()
