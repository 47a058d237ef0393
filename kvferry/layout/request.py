"""The kvferry-request/1 document: what one request moves, and in which pages it lies on both sides."""

from __future__ import annotations

from typing import Literal, Union

from kvferry.layout.document import Struct


class Wanted(Struct):
    """The part of one group that the target wants: a half-open range of tokens, or a state's position."""

    tokens: Union[tuple[int, int], None] = None
    position: Union[int, None] = None

    @property
    def token_range(self) -> tuple[int, int]:
        """The range to move; a state is its one row, [0, 1)."""
        return (0, 1) if self.tokens is None else self.tokens


class Table(Struct):
    """One page table: `pages[i]` holds the tokens from `start + i * page_tokens` on; None is a page that does not exist."""

    pages: tuple[Union[int, None], ...]
    start: int = 0


class Tables(Struct):
    tables: dict[str, Table]


class Side(Struct):
    """Page tables of one instance; `workers` overrides them for single ranks."""

    tables: dict[str, Table] = {}
    workers: dict[str, Tables] = {}

    def table(self, rank: int, name: str) -> Table | None:
        """The table `name` as worker `rank` sees it, or None."""
        override = self.workers.get(str(rank))
        if override is not None and name in override.tables:
            return override.tables[name]
        return self.tables.get(name)


class Request(Struct):
    format: Literal["kvferry-request/1"]
    groups: dict[str, Wanted]
    source: Side
    target: Side
