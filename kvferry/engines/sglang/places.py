"""Where a request lies: SGLang's page ids as what a transfer moves and its page tables. Pure.

SGLang counts whole pages: the last page of a request may hold rows that mean nothing. They move as well as far as both
sides have them, so that a checksum over pages is the same on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.engines.sglang.layout import KV_TABLE, ROW_TABLE, SLIDING
from kvferry.errors import EngineError
from kvferry.layout.document import Group
from kvferry.layout.request import Side, Table, Wanted


@dataclass(frozen=True)
class Pages:
    """One side's page ids. `kv`: of the tokens from `start` on; `states`: by name, of as many last tokens as there are
    pages, or a slot of recurrent state; `row`: the metadata index, None while that is not complete.
    """

    page_tokens: int
    tokens: int
    kv: Sequence[int]
    start: int = 0
    states: Mapping[str, Sequence[int]] = field(default_factory=dict)
    row: int | None = None

    @property
    def stop(self) -> int:
        """Where the last page ends."""
        return self.start + len(self.kv) * self.page_tokens

    def first(self, name: str) -> int:
        """The first token of a state that is paged."""
        return -(-self.tokens // self.page_tokens) * self.page_tokens - len(self.states[name]) * self.page_tokens


def named_states(names: Sequence[str], given: Sequence[Any] | None) -> dict[str, list[int]]:
    """SGLang's page ids of a request's states, which come in the order of `names`, each as numbers or an array."""
    return {name: np.ravel(ids).tolist() for name, ids in zip(names, given or ()) if ids is not None}


def tables(groups: Sequence[Group], table_of: Mapping[str, str], pages: Pages) -> Side:
    """The page tables; a slot of recurrent state stands for the whole request, not for its last token."""
    slots = {table_of[group.name] for group in groups if group.growth == "state"}
    named = {KV_TABLE: Table(tuple(pages.kv), pages.start), ROW_TABLE: Table(() if pages.row is None else (pages.row,))}
    for name, ids in pages.states.items():
        named[name] = Table(tuple(ids), 0 if name in slots else pages.first(name))
    return Side(named)


def held(groups: Sequence[Group], table_of: Mapping[str, str], pages: Pages) -> dict[str, Wanted]:
    """All that is in these pages. `table_of`: each group's page table."""
    return {name: each for name, each in _all(groups, table_of, pages) if each is not None}


def wanted(
    groups: Sequence[Group], table_of: Mapping[str, str], pages: Pages, other_page: int, window: int | None
) -> dict[str, Wanted]:
    """What decode asks for: all that its pages take, as far as pages of `other_page` tokens hold it on the other side.
    `window`: tokens that a sliding window reaches back, as the engine counts them. EngineError where pages are missing.
    """
    found = {}
    for name, each in _all(groups, table_of, pages):
        if each is None:
            raise EngineError(f"group {name}: SGLang names no page of it for this request")
        if each.tokens is not None:
            start, stop = each.tokens
            if table_of[name] == SLIDING and window is not None:
                start = max(start, max(0, pages.tokens - window) // other_page * other_page)
            each = Wanted(tokens=(start, max(start, min(stop, -(-pages.tokens // other_page) * other_page))))
        found[name] = each
    return found


def _all(groups: Sequence[Group], table_of: Mapping[str, str], pages: Pages) -> list[tuple[str, Wanted | None]]:
    found: list[tuple[str, Wanted | None]] = []
    for group in groups:
        table = table_of[group.name]
        if table == KV_TABLE:
            found.append((group.name, Wanted(tokens=(pages.start, pages.stop))))
        elif table == ROW_TABLE:
            found.append((group.name, None if pages.row is None else Wanted(position=pages.tokens)))
        elif table not in pages.states:
            found.append((group.name, None))
        elif group.growth == "state":
            found.append((group.name, Wanted(position=pages.tokens)))
        else:
            end = pages.first(table) + len(pages.states[table]) * pages.page_tokens
            found.append((group.name, Wanted(tokens=(pages.first(table), end))))
    return found
