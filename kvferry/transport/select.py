"""Choosing a way at connect: the first in the order of preference that both sides have and that really works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.errors import DocumentError, MissingExtra, TransportError, TransportUnavailable
from kvferry.layout.document import decode_msgpack, encode_msgpack
from kvferry.transport.base import Export, Peer
from kvferry.transport.copies import Bytes
from kvferry.transport.costs import MOVES
from kvferry.transport.hosts import is_loopback
from kvferry.transport.local import ProcessVmPeer, ShmPeer, local_card
from kvferry.transport.nixl import Node, need_nixl
from kvferry.transport.staging import Staging
from kvferry.transport.tcp import Receiver, TcpPeer

WAYS = {
    "auto": ("shm", "process_vm", "nixl", "tcp"),
    "local": ("shm", "process_vm"),
    "shm": ("shm",),
    "process_vm": ("process_vm",),
    "tcp": ("tcp",),
    "nixl": ("nixl",),
}
RDMA = Path("/sys/class/infiniband")
"""Empty or absent where there is no RDMA device. NIXL then has nothing that the ways beside it don't do better."""


class SelectingTransport:
    """Offers and uses the ways that `name` stands for.

    At the target, tcp has a receiver and NIXL a thread that makes progress; shm and process_vm need nothing there.
    """

    def __init__(
        self,
        name: str,
        staging: Staging,
        host: str = "127.0.0.1",
        pages: Sequence[Bytes] = (),
        pages_open: bool = False,
    ) -> None:
        if name not in WAYS:
            raise DocumentError("transport", f"must be one of {', '.join(WAYS)}, got {name!r}")
        self.name = name
        self._ways = tuple(way for way in WAYS[name] if way in staging.ways)
        if not self._ways:
            raise DocumentError("transport", f"{name!r} can't write to this landing memory, only {staging.ways} can")
        self._staging, self._pages, self._pages_open = staging, pages, pages_open
        if pages_open and not set(self._ways) & MOVES:
            raise DocumentError("landing", f"pages can't be written over {name!r}; use {' or '.join(sorted(MOVES))}")
        self._absent: dict[str, str] = {}  # ways of `name` that can't be had here, and why
        self._node = self._open_nixl(host) if "nixl" in self._ways else None
        self._receiver = Receiver(staging, host) if "tcp" in self._ways else None
        self._connect: dict[str, Callable[[Export, Any], Peer]] = {
            "shm": ShmPeer,
            "process_vm": ProcessVmPeer,
            "tcp": partial(TcpPeer, own_host=host),
        }
        if self._node:
            self._connect["nixl"] = self._node.connect

    def _open_nixl(self, host: str) -> Node | None:
        """None, with the reason kept, where `auto` does without."""
        if self.name == "auto":
            if not (RDMA.is_dir() and any(RDMA.iterdir())):
                self._absent["nixl"] = "left out, no RDMA device here"
                return None
            try:
                need_nixl()
            except MissingExtra as error:
                self._absent["nixl"] = str(error)
                return None
        return Node(self._staging, self._pages, self._pages_open, is_loopback(host))

    def export(self) -> bytes:
        offered = [way for way in self._ways if way in MOVES or not self._pages_open]
        local = local_card(self._staging) if {"shm", "process_vm"} & set(offered) else None
        card = Export(
            "kvferry-transport/1",
            self._staging.layout,
            self._staging.key,
            shm=local if "shm" in offered else None,
            process_vm=local if "process_vm" in offered else None,
            tcp=self._receiver.card if self._receiver and "tcp" in offered else None,
            nixl=self._node.card if self._node else None,
        )
        return encode_msgpack(card)

    def grant(self, grant: bytes, slot: int, nbytes: int) -> None:
        if self._node:
            self._node.grant(grant)
        if self._receiver:
            self._receiver.grant(grant, slot, nbytes)

    def revoke(self, grant: bytes) -> None:
        if self._node:
            self._node.revoke(grant)
        if self._receiver:
            self._receiver.revoke(grant)

    def connect(self, export: bytes) -> Peer:
        known = decode_msgpack(export, Export)
        known.slots.check()
        tried = []
        for way in self._ways:
            card = getattr(known, way)
            problem = self._absent.get(way) or ("" if card is not None else "not offered by the peer")
            if problem:
                tried.append(f"{way}: {problem}")
                continue
            try:
                peer = self._connect[way](known, card)
            except TransportError as error:
                tried.append(f"{way}: {error}")
                continue
            peer.reason = "; ".join([*tried, f"{way}: works"])
            return peer
        raise TransportUnavailable(f"no way to the peer over {self.name!r}: {'; '.join(tried)}")

    def close(self) -> None:
        if self._node:
            self._node.close()
        if self._receiver:
            self._receiver.close()
