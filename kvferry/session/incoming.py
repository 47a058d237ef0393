"""What a target knows of one transfer, and how it says what the transfer still waits for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.plan.prove import Proof
from kvferry.session.events import Ended, ReceiveCall, Shipment
from kvferry.session.messages import Digest, Peer
from kvferry.session.registry import Entry
from kvferry.session.slots import Lease

Name = tuple[str, str]
"""(registry, instance); "" is the endpoint's own registry."""


@dataclass
class Flow:
    """What one source worker brings."""

    shipment: Shipment
    unready: list[int]  # pieces that the source doesn't have yet
    waiting: deque[int] = field(default_factory=deque)  # pieces that are ready, without a slot yet
    granted: dict[int, Lease] = field(default_factory=dict)
    ready: bool = False  # all of it is there, the source has checked
    landed: int = 0
    lease_end_s: float = -math.inf  # until when we may count on its pages

    @property
    def done(self) -> bool:
        return self.ready and self.landed == len(self.shipment.pieces)


@dataclass
class Incoming:
    call: ReceiveCall
    started_s: float
    deadline_s: float
    phase: str = "preparing"
    found: dict[Name, tuple[Entry, ...]] = field(default_factory=dict)
    problem: str = ""
    sources: tuple[Peer, ...] = ()
    ranks: tuple[Peer, ...] = ()  # of our own instance, us included
    look_again_s: float = math.inf  # when the registry is asked again, while somebody has not answered our hello
    planning: bool = False
    flows: dict[Peer, Flow] = field(default_factory=dict)
    landed: set[Peer] = field(default_factory=set)  # the leader's list
    scattering: dict[tuple[Peer, int], Lease] = field(default_factory=dict)
    error: Ended | None = None
    proof: Proof | None = None
    digest: Digest | None = None
    verified: bool = False
    sums: dict[tuple[str, int], int] = field(default_factory=dict)  # by (group, layer), as the sources say
    bytes: int = 0
    copies: int = 0

    @property
    def due_s(self) -> float:
        return min(self.deadline_s, self.look_again_s)

    @property
    def who(self) -> str:
        """The other side, as exactly as it is known."""
        return ", ".join(map(str, self.sources[:4])) or self.call.source

    def names(self, own: Name) -> tuple[Name, ...]:
        """Instances that have to be found."""
        source = (self.call.registry, self.call.source)
        return (source,) if self.call.connect_only else (source, own)


def peers_of(entries: tuple[Entry, ...]) -> tuple[Peer, ...]:
    return tuple(Peer(entry.instance, entry.generation, entry.rank) for entry in entries)


def waits_for(t: Incoming, me: Peer, silent_s: Callable[[Peer], float]) -> tuple[Peer | None, str]:
    """A peer that the transfer waits for, and what it waits for in words. `silent_s`: how long a peer has been silent,
    0 where it is not.
    """
    flow = next(((peer, flow) for peer, flow in t.flows.items() if not flow.done), None)
    if t.phase == "preparing":
        peers = [peer for peer in (*t.sources, *t.ranks) if silent_s(peer)]
        waiting, what = next(iter(peers), None), t.problem or "still planning"
    elif t.phase == "committing":
        late = [peer for peer in t.ranks if peer not in t.landed and peer != me]
        names = ", ".join(map(str, late)) if me == t.ranks[0] else f"{t.ranks[0]} to commit"
        waiting, what = next(iter(late), None), f"landed here, still waiting for target ranks: {names}"
    elif flow is None:
        waiting, what = None, "all of it is here, still being checked"
    elif not flow[1].ready:
        waiting, what = flow[0], f"still waiting for {flow[0]} to send()"
    else:
        landed = f"{flow[1].landed} of {len(flow[1].shipment.pieces)} pieces have landed"
        waiting, what = flow[0], f"still waiting for {flow[0]}, {landed}"
    quiet_s = silent_s(waiting) if waiting is not None else 0.0
    return waiting, what + (f"; no word from {waiting} for {quiet_s:.1f} s" if quiet_s else "")


def follows(peer: Peer, other: Peer) -> bool:
    """Whether `peer` is a later start of the same worker."""
    return (peer.instance, peer.rank) == (other.instance, other.rank) and peer.generation > other.generation
