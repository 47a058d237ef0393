"""The fenced blocks of the pages, and what the comment above each says about how it is tested.

    <!-- test: slow -->                         takes longer than a second or two: `make test-docs`
    <!-- test: background until "TEXT" -->      a server: it runs to the end of the page, TEXT says that it is up
    <!-- test: elsewhere PLACE, PLACE … -->     run by these tests, targets of the Makefile, or by .ci/run itself

A block without such a comment is run as it stands, after those above it on its page. `sh` is commands, `console` is
commands after `$` with their output, in which … stands for anything; `python` is a program, or, with a title, the
file of that name. Other blocks are files if they have a title, and else only shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = tuple(
    sorted(
        str(page.relative_to(REPOSITORY))
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
        for page in REPOSITORY.glob(pattern)
    )
)
RUN = ("sh", "console", "python")
_FENCE = re.compile(
    r"(?:^ *<!-- test: (?P<test>.*?) -->\n+)?^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_TITLE = re.compile(r'title="([^"]+)"')
_UNTIL = re.compile(r'background until "(.+)"')


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    title: str
    body: str
    test: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return (self.language in RUN or self.is_file) and not self.test.startswith("elsewhere")

    @property
    def is_file(self) -> bool:
        return bool(self.title) and "/" not in self.title

    @property
    def slow(self) -> bool:
        return self.test == "slow"

    @property
    def until(self) -> str:
        """What a server prints when it is up; empty for what is no server."""
        found = _UNTIL.fullmatch(self.test)
        return found[1] if found else ""

    @property
    def elsewhere(self) -> list[str]:
        """Who runs it instead."""
        kind, _, places = self.test.partition(" ")
        return [place.strip() for place in places.split(",")] if kind == "elsewhere" else []

    @property
    def known(self) -> bool:
        """Whether its comment means something."""
        return bool(not self.test or self.slow or self.until or self.elsewhere)


def blocks_of(page: str) -> list[Block]:
    text = (REPOSITORY / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["info"])
        language = (match["info"].split() or [""])[0]
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.M)
        line = text.count("\n", 0, match.start("info")) + 1
        found.append(Block(page, line, language, title[1] if title else "", body, match["test"] or ""))
    return found
