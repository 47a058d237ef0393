"""What goes into the session's state machine and what comes out of it. Plain data: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Union

from kvferry.errors import KVFerryError, TransferError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance
from kvferry.layout.request import Side, Wanted
from kvferry.plan.dense import Chunk
from kvferry.plan.prove import Proof
from kvferry.session.messages import NO_PLACE, Digest, Message, Peer, Piece, Place, Process, Role
from kvferry.session.registry import Entry


@dataclass(frozen=True)
class Report:
    """What one side of a finished transfer moved. `copies`: runs gathered or scattered here; `peers`: who with.

    `proof`: what the target had shown of its own pages before anything moved; a source has none.
    """

    bytes: int
    copies: int
    chunks: int
    seconds: float
    peers: tuple[str, ...]
    proof: Proof | None = None


# events


Fence = Callable[[], None]
"""Returns when the pages it stands for may be read."""


@dataclass(frozen=True)
class SendCall:
    """`layers`: the only ones that are there yet; `last`: no ExtendCall follows."""

    transfer: str
    groups: dict[str, Wanted]
    tables: Side
    timeout_s: float
    layers: tuple[int, ...] | None = None
    last: bool = True
    fence: Fence | None = None


@dataclass(frozen=True)
class ExtendCall:
    """More of a transfer is there. `groups` and `tables` take the place of those said before."""

    transfer: str
    groups: dict[str, Wanted]
    tables: Side
    layers: tuple[int, ...] | None
    last: bool
    fence: Fence | None


@dataclass(frozen=True)
class ReceiveCall:
    """`connect_only`: stop after the handshake. `registry`: the URL that knows `source`; "" is the endpoint's own.
    `piece_tokens`: pieces hold no more tokens than that; 0 leaves it to the size of a slot.
    """

    transfer: str
    source: str
    groups: dict[str, Wanted]
    tables: Side
    timeout_s: float
    connect_only: bool = False
    registry: str = ""
    piece_tokens: int = 0


@dataclass(frozen=True)
class AbortCall:
    role: Role
    transfer: str
    reason: str


@dataclass(frozen=True)
class DrainCall:
    """End what runs, take nothing new."""


@dataclass(frozen=True)
class Received:
    sender: Peer
    recipient: Peer
    body: Message
    place: Place = NO_PLACE


@dataclass(frozen=True)
class Found:
    """Every worker of a ready instance, as `registry` knows it; "" is the endpoint's own."""

    instance: str
    entries: tuple[Entry, ...]
    registry: str = ""


@dataclass(frozen=True)
class NotFound:
    """The instance is not ready; the shell keeps asking."""

    instance: str
    problem: str
    registry: str = ""


@dataclass(frozen=True)
class Shipment:
    """What one source worker sends us: pieces, and all target ranks that take from that worker.

    `runs`: per piece where it lands in our pages, encoded for its grant; empty where pieces land in slots.
    """

    pieces: tuple[Piece, ...]
    takers: tuple[int, ...]
    runs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """By source rank. `whole`: per group, what a digest of its cells needs to know."""

    transfer: str
    shipments: dict[int, Shipment]
    proof: Proof
    whole: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PrepareFailed:
    transfer: str
    error: KVFerryError


@dataclass(frozen=True)
class Written:
    """A piece lies in the peer's slot. `digests`: of each of its layers, where they were asked for.

    `way`: the transport; `gathered`: into one write, rather than one descriptor for each of the `copies`.
    """

    transfer: str
    peer: Peer
    piece: int
    copies: int
    digests: tuple[int, ...] = ()
    way: str = ""
    gathered: bool = True


@dataclass(frozen=True)
class WriteFailed:
    transfer: str
    peer: Peer
    piece: int
    error: KVFerryError


@dataclass(frozen=True)
class Scattered:
    """In `copies` runs."""

    transfer: str
    peer: Peer
    piece: int
    copies: int


@dataclass(frozen=True)
class ScatterFailed:
    transfer: str
    peer: Peer
    piece: int
    error: KVFerryError


@dataclass(frozen=True)
class Verified:
    """The digests of what lies in our pages, by (group, layer)."""

    transfer: str
    digests: dict[tuple[str, int], int]


@dataclass(frozen=True)
class VerifyFailed:
    transfer: str
    error: KVFerryError


@dataclass(frozen=True)
class Died:
    """The peer's process has ended: witnessed, not guessed."""

    peer: Peer


Event = Union[
    SendCall, ExtendCall, ReceiveCall, AbortCall, DrainCall, Received, Found, NotFound, Prepared, PrepareFailed,
    Written, WriteFailed, Scattered, ScatterFailed, Verified, VerifyFailed, Died,
]  # fmt: skip


# actions


@dataclass(frozen=True)
class Lookup:
    """Ask `registry` for `instance` until it is ready or `until_s` (the machine's clock) has passed."""

    instance: str
    until_s: float
    registry: str = ""


@dataclass(frozen=True)
class Open:
    """Open the line to a peer. `key`: its public key, empty without keys."""

    peer: Peer
    address: str
    key: str = ""


@dataclass(frozen=True)
class Watch:
    """Tell when this process ends."""

    peer: Peer
    process: Process


@dataclass(frozen=True)
class Close:
    """The peer is gone."""

    peer: Peer


@dataclass(frozen=True)
class Send:
    peer: Peer
    body: Message
    place: Place = NO_PLACE


@dataclass(frozen=True)
class Prepare:
    """Route, cut into pieces and bind to our pages; `key` names the pair of instances, generations included."""

    transfer: str
    key: tuple[tuple[Peer, ...], tuple[Peer, ...]]
    source: Instance
    target: Instance
    groups: dict[str, Wanted]
    tables: Side
    piece_tokens: int = 0


@dataclass(frozen=True)
class Allow:
    """Let the transport accept this grant."""

    grant: bytes
    slot: int
    nbytes: int


@dataclass(frozen=True)
class Revoke:
    grant: bytes


@dataclass(frozen=True)
class Write:
    """Move a piece from our pages into the peer's slot, or with `runs` into its pages; first wait for the fences."""

    transfer: str
    peer: Peer
    export: bytes
    piece: int
    chunk: Chunk
    grant: bytes
    address: Address
    nbytes: int
    tables: Side
    timeout_s: float
    runs: bytes = b""
    fences: tuple[Fence, ...] = ()
    digest: Digest | None = None


@dataclass(frozen=True)
class CancelWrites:
    """Writes of this transfer that have not begun must not begin; each still reports its end."""

    transfer: str


@dataclass(frozen=True)
class Scatter:
    """Move a piece from its slot into our pages."""

    transfer: str
    peer: Peer
    piece: int
    slot: int
    nbytes: int
    chunk: Chunk
    tables: Side


@dataclass(frozen=True)
class Verify:
    """Digest what was wanted, read from our pages by our own layout."""

    transfer: str
    groups: dict[str, Wanted]
    tables: Side
    digest: Digest


@dataclass(frozen=True)
class Ended:
    """The transfer's one end on this side: a report, or an error.

    `pages_held`: its pages must not be used for anything else before `Released`, since a peer may still write there.
    """

    role: Role
    transfer: str
    report: Union[Report, None] = None
    error: Union[TransferError, None] = field(default=None)
    pages_held: bool = False


@dataclass(frozen=True)
class Released:
    """For certain nobody writes into the pages of this failed transfer any more."""

    transfer: str


@dataclass(frozen=True)
class Note:
    """Something for the log: a message was dropped, and why."""

    text: str


Action = Union[
    Note, Lookup, Open, Watch, Close, Send, Prepare, Allow, Revoke, Write, CancelWrites, Scatter, Verify, Ended,
    Released,
]  # fmt: skip
