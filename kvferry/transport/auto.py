"""Several transports as one: the first that works between two processes is taken, and says why the others were not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.errors import TransportUnavailable
from kvferry.layout.document import encode_msgpack
from kvferry.transport.base import Peer, Transport, read_export


class Exports(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    by_name: dict[str, bytes]


class FirstThatWorks:
    """Exports all of `transports`; connects by the first, in that order, that reaches the peer."""

    def __init__(self, name: str, transports: Sequence[Transport]) -> None:
        self.name = name
        self._transports = tuple(transports)

    def export(self) -> bytes:
        return encode_msgpack(Exports({t.name: t.export() for t in self._transports}))

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        for transport in self._transports:
            transport.grant(grant, slot, nbytes)

    def revoke(self, grant: bytes) -> None:
        for transport in self._transports:
            transport.revoke(grant)

    def connect(self, export: bytes) -> Peer:
        offered = read_export(export, Exports).by_name
        missed = []
        for transport in self._transports:
            if transport.name not in offered:
                missed.append(f"{transport.name}: the peer doesn't offer it")
                continue
            try:
                peer = transport.connect(offered[transport.name])
            except TransportUnavailable as error:
                missed.append(f"{transport.name}: {error}")
                continue
            return Chosen(peer, "; ".join([*missed, f"{transport.name}: {peer.reason}"])) if missed else peer
        raise TransportUnavailable(f"no transport reaches this peer: {'; '.join(missed)}")

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class Chosen:
    """A peer, with the reasons why those before it were passed over."""

    def __init__(self, peer: Peer, reason: str) -> None:
        self.name = peer.name
        self.reason = reason
        self.write = peer.write
        self.slot = peer.slot
        self.close = peer.close
