"""What endpoints say to each other: MessagePack in an envelope whose first field is the protocol version.

Every field is typed and bounded. Nothing here is executable and nothing is trusted: a message that does not decode is
refused as a whole.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union

import msgspec

from kvferry.errors import DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance, Row, Struct, decode_msgpack, encode_msgpack
from kvferry.layout.request import Wanted
from kvferry.plan.dense import Chunk

PROTOCOL = 3
MAX_MESSAGE_BYTES = 16 << 20
GRANT_BYTES = 16

TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Secret = Annotated[bytes, msgspec.Meta(min_length=GRANT_BYTES, max_length=GRANT_BYTES)]
RunList = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Word = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Role = Literal["source", "target"]
FailureKind = Literal["aborted", "refused", "timeout", "lost", "corrupted"]


class Peer(Row, frozen=True):
    """One start of one worker. Nothing is identified by host, port or position in a list."""

    instance: Name
    generation: Count
    rank: Count

    def __str__(self) -> str:
        return f"{self.instance}/{self.generation}/{self.rank}"


class Process(Row, frozen=True):
    """Identifies a process on this host, so that its death can be witnessed. `start`: its start in clock ticks."""

    pid: Count
    start: Count
    namespace: Text


class Card(Struct, frozen=True):
    """What a worker tells about itself at the handshake. `instance` holds its own worker only.

    `key`: its public key, if it has keys.
    """

    address: Name
    world: Count
    instance: Instance
    export: bytes
    process: Union[Process, None] = None
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Body(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag=str.lower
):
    """Base of all messages."""


class Hello(Body, frozen=True):
    card: Card


class Welcome(Body, frozen=True):
    card: Card


class Piece(Row, frozen=True):
    """A chunk the target wants, and its exact size."""

    chunk: Chunk
    bytes: Count


class Grant(Row, frozen=True):
    """Leave to write `bytes` of piece `piece` at `address`, once.

    With `runs` the piece lands in the target's pages instead: 16 bytes per run, address and length, little-endian, in
    the piece's order.
    """

    piece: Count
    grant: Secret
    address: Address
    bytes: Count
    runs: RunList = b""


class About(Body, frozen=True):
    """Base of the messages about one transfer."""

    transfer: TransferId
    attempt: Count


class Digest(Struct, frozen=True):
    """How the bytes of this transfer are digested: see `kvferry.plan.digest`. `whole`: by group."""

    key: Secret
    whole: dict[str, Count]


class Offer(About, frozen=True):
    """Target → source: what we want. `takers`: all target ranks that send you an offer; `timeout_s`: a duration."""

    groups: dict[str, Wanted]
    pieces: tuple[Piece, ...]
    takers: tuple[int, ...]
    timeout_s: Seconds
    digest: Union[Digest, None] = None


class Part(Struct, frozen=True):
    """What a source has said is in its pages: of each group these tokens, of these layers (None: of all)."""

    groups: dict[str, Wanted]
    layers: Union[tuple[Count, ...], None] = None


class Ready(About, frozen=True):
    """Source → target: grants may follow for pieces that lie in `parts`, each of which still holds.

    `last`: nothing will be added; the source has checked that all of the offer is there.
    """

    parts: tuple[Part, ...]
    last: bool


class Grants(About, frozen=True):
    """Target → source."""

    grants: tuple[Grant, ...]


class ChunkDone(About, frozen=True):
    """Source → target: exactly `bytes` lie in the granted slot and we write there no more.

    `digests`: of each layer of the piece, where the offer asks for them. `lease_s`: how long the source goes on, as
    `kvferry.session.lease` counts it.
    """

    piece: Count
    grant: Secret
    bytes: Count
    digests: tuple[Word, ...] = ()
    lease_s: Seconds = 1e6


class Landed(About, frozen=True):
    """Target rank → its leader: everything wanted here is in its pages."""


class Commit(About, frozen=True):
    """Leader → target ranks: every rank has landed."""


class Complete(About, frozen=True):
    """Target rank → source: committed."""


class Abort(About, frozen=True):
    """`role` is the receiver's role in the transfer."""

    role: Role
    kind: FailureKind
    reason: Text


class AbortAck(About, frozen=True):
    """Source → target: none of our writers touches your slots of this transfer any more."""


class Beat(Body, frozen=True):
    """A sign of life, which says what its sender has heard. `ask`: one is wanted in answer."""

    ask: bool


class Goodbye(Body, frozen=True):
    """This endpoint closes: none of its writers runs any more, and it will say nothing else."""


Message = Union[
    Hello, Welcome, Goodbye, Beat, Offer, Ready, Grants, ChunkDone, Landed, Commit, Complete, Abort, AbortAck
]


class Place(Row, frozen=True):
    """Where a message stands among all that its sender says to this recipient, see `kvferry.session.delivery`.

    `number`: its own, 0 for a message that is not repeated when it is lost; `after`: of the one before it that still
    matters; `heard`: the newest that its sender has heard from the recipient.
    """

    number: Count = 0
    after: Count = 0
    heard: Count = 0


NO_PLACE = Place()


class Envelope(Row, frozen=True):
    version: int
    sender: Peer
    recipient: Peer
    body: Message
    place: Place = NO_PLACE


class _Version(msgspec.Struct, frozen=True, array_like=True):
    version: int


def encode(sender: Peer, recipient: Peer, body: Message, place: Place = NO_PLACE) -> bytes:
    """DocumentError where the message is too large to be accepted."""
    data = encode_msgpack(Envelope(PROTOCOL, sender, recipient, body, place))
    if len(data) > MAX_MESSAGE_BYTES:
        raise DocumentError(
            type(body).__name__, f"message has {len(data)} bytes, at most {MAX_MESSAGE_BYTES} may be sent"
        )
    return data


def decode(data: bytes) -> Envelope:
    """DocumentError for anything that is no message of this protocol version."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise DocumentError("", f"message has {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are accepted")
    version = decode_msgpack(data, _Version).version
    if version != PROTOCOL:
        raise DocumentError(
            "version", f"peer speaks protocol {version}, this side {PROTOCOL}; run the same kvferry release on both"
        )
    return decode_msgpack(data, Envelope)
