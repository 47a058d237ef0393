"""What the README lists is there; its commands are run by tests/docs."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.cli import main as cli

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_every_command_is_listed() -> None:
    (commands,) = blocks("text")
    assert {line.split()[1] for line in commands.splitlines()} == set(cli.COMMANDS)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert targets
    assert [target for target in targets if "://" not in target and not (REPOSITORY / target).exists()] == []
