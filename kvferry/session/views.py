"""What registries have said of instances. A request that starts on it at once doesn't wait for a server that is busy
computing prompts; the registry is asked meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.session.core import PEER_LIMIT, Core
from kvferry.session.incoming import Incoming, Name, follows, peers_of
from kvferry.session.messages import Peer
from kvferry.session.registry import Entry

FRESH_S = 0.1
"""Older answers are asked for again. So short that a later start seldom falls between, so long that many requests
at once ask once.
"""


class Views:
    """The last answer about each instance."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._last: dict[Name, tuple[float, tuple[Entry, ...]]] = {}

    def add(self, name: Name, entries: tuple[Entry, ...]) -> None:
        self._last.pop(name, None)
        self._last[name] = self._core.now, entries
        if len(self._last) > PEER_LIMIT:
            del self._last[next(iter(self._last))]

    def usable(self, names: Iterable[Name]) -> dict[Name, tuple[Entry, ...]]:
        """Of `names`, those whose workers we have all met, and know nothing against."""
        found = {name: self._last[name][1] for name in names if name in self._last}
        return {name: entries for name, entries in found.items() if self._all_met(entries)}

    def fresh(self, names: Iterable[Name]) -> set[Name]:
        """Of `names`, those that need not be asked for again."""
        return {name for name in names if self._core.now - self._last[name][0] < FRESH_S}

    def greet_later_starts(self, t: Incoming, entries: tuple[Entry, ...]) -> None:
        """Of workers of `t` that may be gone."""
        core, workers = self._core, (*t.sources, *t.ranks)
        for peer, entry in zip(peers_of(entries), entries):
            if peer not in core.known and any(follows(peer, worker) for worker in workers):
                core.hello(peer, entry.address, entry.key, t.deadline_s)
                core.problems.pop(peer, None)

    def takes_over(self, t: Incoming, earlier: Peer, later: Peer) -> bool:
        """Whether `t` began after a later start of this source, without knowing of it, and nothing came of that yet."""
        known, flow = self._core.known, t.flows.get(earlier)
        assumed = earlier in t.sources and t.source in t.assumed
        return assumed and known[earlier].world == known[later].world and (flow is None or not flow.began)

    def _all_met(self, entries: tuple[Entry, ...]) -> bool:
        core = self._core
        return all(
            peer == core.me
            or (core.knows(peer, entry.key) and peer not in core.superseded and not core.delivery.silent_s(peer))
            for peer, entry in zip(peers_of(entries), entries)
        )
