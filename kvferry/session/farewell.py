"""A transfer that ends here before its peers are known still ends at them: they are looked up, greeted and told.

After its deadline only those that are known are told: who has not answered by then is not waited for once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvferry.session.core import Core
from kvferry.session.events import Found, Lookup
from kvferry.session.incoming import Incoming, Name, peers_of
from kvferry.session.messages import FailureKind, Peer, Role
from kvferry.session.registry import Entry

FAREWELL_S = 60.0
"""How long peers are looked for. A source that isn't there by then has its own deadline."""
FAREWELL_LIMIT = 4_096


@dataclass
class _Farewell:
    transfer: str
    kind: FailureKind
    reason: str
    until_s: float
    names: set[Name]  # not found yet
    but: Peer | None
    waiting: set[Peer] = field(default_factory=set)  # found, and not known yet


class Farewells:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[str, _Farewell] = {}

    def add(self, t: Incoming, own: Name, kind: FailureKind, reason: str, but: Peer | None) -> None:
        """Tell all peers of `t`, `but` one, that it has ended, now or when they are known."""
        core, until_s = self._core, self._core.now + FAREWELL_S
        farewell = _Farewell(t.call.transfer, kind, reason, until_s, set(t.names(own)) - t.found.keys(), but)
        for entries in t.found.values():
            self._tell(farewell, entries)
        if kind == "timeout":
            return
        if (farewell.names or farewell.waiting) and len(self._open) < FAREWELL_LIMIT:
            self._open[t.call.transfer] = farewell
            core.out += [Lookup(instance, until_s, registry) for registry, instance in sorted(farewell.names)]

    def found(self, event: Found) -> None:
        for farewell in list(self._open.values()):
            if (event.registry, event.instance) in farewell.names:
                farewell.names.discard((event.registry, event.instance))
                self._tell(farewell, event.entries)
                self._close(farewell)

    def handshaken(self, peer: Peer) -> None:
        for farewell in list(self._open.values()):
            if peer in farewell.waiting:
                farewell.waiting.discard(peer)
                self._core.problems.pop(peer, None)  # or the next transfer would think it its own
                if peer in self._core.known:
                    self._say(farewell, peer)
                self._close(farewell)

    def died(self, peer: Peer) -> None:
        for farewell in list(self._open.values()):
            farewell.waiting.discard(peer)
            self._close(farewell)

    def tick(self) -> None:
        for farewell in [one for one in self._open.values() if one.until_s <= self._core.now]:
            del self._open[farewell.transfer]

    def next_s(self) -> float:
        return min((farewell.until_s for farewell in self._open.values()), default=math.inf)

    def _tell(self, farewell: _Farewell, entries: tuple[Entry, ...]) -> None:
        core = self._core
        for peer, entry in zip(peers_of(entries), entries):
            if peer in (core.me, farewell.but):
                continue
            if core.knows(peer, entry.key):
                self._say(farewell, peer)
                continue
            if farewell.kind == "timeout":
                continue
            core.hello(peer, entry.address, entry.key, farewell.until_s)
            if core.problems.pop(peer, None) is None:
                farewell.waiting.add(peer)

    def _say(self, farewell: _Farewell, peer: Peer) -> None:
        role: Role = "target" if peer.instance == self._core.me.instance else "source"
        self._core.abort(peer, role, farewell.transfer, farewell.kind, farewell.reason)

    def _close(self, farewell: _Farewell) -> None:
        if not farewell.names and not farewell.waiting:
            self._open.pop(farewell.transfer, None)
