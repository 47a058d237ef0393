"""The kvferry-request/1 document: what one request moves, and in which pages it lies on both sides."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvferry.layout.document import Struct


class Wanted(Struct, frozen=True):
    """The part of one group that the target wants: a half-open range of tokens, or a state's position."""

    tokens: tuple[int, int] | None = None
    position: int | None = None

    @property
    def token_range(self) -> tuple[int, int]:
        """The range to move; a state is its one row, [0, 1)."""
        return (0, 1) if self.tokens is None else self.tokens


class Table(Struct, frozen=True, dict=True):
    """One page table: `pages[i]` holds the tokens from `start + i * page_tokens` on; None is a page that does not
    exist.
    """

    pages: tuple[int | None, ...]
    start: int = 0

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """`pages` as an array, -1 for None. OverflowError for a number of 2**63 or more."""
        try:
            return np.array(self.pages, dtype=np.int64)
        except TypeError:
            return np.array([-1 if page is None else page for page in self.pages], dtype=np.int64)


class Tables(Struct, frozen=True):
    tables: dict[str, Table]


class Side(Struct, frozen=True):
    """Page tables of one instance; `workers` overrides them for single ranks."""

    tables: dict[str, Table] = {}  # noqa: RUF012  (msgspec copies defaults)
    workers: dict[str, Tables] = {}  # noqa: RUF012

    def table(self, rank: int, name: str) -> Table | None:
        """The table `name` as worker `rank` sees it, or None."""
        override = self.workers.get(str(rank))
        if override is not None and name in override.tables:
            return override.tables[name]
        return self.tables.get(name)


class Request(Struct, frozen=True):
    format: Literal["kvferry-request/1"]
    groups: dict[str, Wanted]
    source: Side
    target: Side
