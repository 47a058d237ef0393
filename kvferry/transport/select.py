"""Choosing a way at connect: the first in the order of preference that both sides have and that really works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.errors import DocumentError, TransportError, TransportUnavailable
from kvferry.layout.document import decode_msgpack, encode_msgpack
from kvferry.transport.base import Export, Peer
from kvferry.transport.local import ProcessVmPeer, ShmPeer, local_card
from kvferry.transport.staging import Staging
from kvferry.transport.tcp import Receiver, TcpPeer

CONNECT: dict[str, Callable[[Export, Any], Peer]] = {"shm": ShmPeer, "process_vm": ProcessVmPeer, "tcp": TcpPeer}
WAYS = {
    "auto": ("shm", "process_vm", "tcp"),
    "local": ("shm", "process_vm"),
    "shm": ("shm",),
    "process_vm": ("process_vm",),
    "tcp": ("tcp",),
}


class SelectingTransport:
    """Offers and uses the ways that `name` stands for. Only tcp has something running at the target: its receiver."""

    def __init__(self, name: str, staging: Staging, host: str = "127.0.0.1") -> None:
        if name not in WAYS:
            raise DocumentError("transport", f"must be one of {', '.join(WAYS)}, got {name!r}")
        self.name = name
        self._ways = WAYS[name]
        self._staging = staging
        self._receiver = Receiver(staging, host) if "tcp" in self._ways else None

    def export(self) -> bytes:
        local = local_card(self._staging)
        card = Export(
            "kvferry-transport/1",
            self._staging.layout,
            self._staging.key,
            shm=local if "shm" in self._ways else None,
            process_vm=local if "process_vm" in self._ways else None,
            tcp=self._receiver.card if self._receiver else None,
        )
        return encode_msgpack(card)

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        if self._receiver:
            self._receiver.grant(grant, slot, nbytes)

    def revoke(self, grant: bytes) -> None:
        if self._receiver:
            self._receiver.revoke(grant)

    def connect(self, export: bytes) -> Peer:
        known = decode_msgpack(export, Export)
        known.slots.check()
        tried = []
        for way in self._ways:
            card = getattr(known, way)
            if card is None:
                tried.append(f"{way}: not offered by the peer")
                continue
            try:
                peer = CONNECT[way](known, card)
            except TransportError as error:
                tried.append(f"{way}: {error}")
                continue
            peer.reason = "; ".join([*tried, f"{way}: works"])
            return peer
        raise TransportUnavailable(f"no way to the peer over {self.name!r}: {'; '.join(tried)}")

    def close(self) -> None:
        if self._receiver:
            self._receiver.close()
