"""Who holds which landing slot. A slot is reused only when nobody can still write into it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.session.messages import Peer


@dataclass(frozen=True)
class Lease:
    """One granted slot, or with slot None the pages of one piece. `granted_s`: when, by the machine's clock."""

    slot: int | None
    transfer: str
    peer: Peer
    piece: int
    grant: bytes
    nbytes: int
    granted_s: float


class Ledger:
    """Slots are free, leased (a peer may write, or we are scattering) or in quarantine (a peer's writer is in doubt).

    No peer holds more than half of the slots, so a slow one leaves room for the others.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots))[::-1]
        self._leases: dict[bytes, Lease] = {}
        self._doubt: dict[tuple[str, Peer], list[int | None]] = {}
        self._per_peer: Counter[Peer] = Counter()
        self._cap = max(1, slots // 2)

    def take(self, transfer: str, peer: Peer, piece: int, nbytes: int, grant: bytes, now: float) -> Lease | None:
        """A lease on a free slot; None where there is none for this peer now."""
        if not self._free or self._per_peer[peer] >= self._cap:
            return None
        lease = Lease(self._free.pop(), transfer, peer, piece, grant, nbytes, now)
        self._leases[grant] = lease
        self._per_peer[peer] += 1
        return lease

    def take_pages(self, transfer: str, peer: Peer, piece: int, nbytes: int, grant: bytes, now: float) -> Lease:
        """A lease on the transfer's own pages: no slot is used."""
        lease = self._leases[grant] = Lease(None, transfer, peer, piece, grant, nbytes, now)
        return lease

    def release(self, lease: Lease) -> None:
        del self._leases[lease.grant]
        self._give_back(lease.slot, lease.peer)

    def quarantine(self, lease: Lease) -> None:
        """The lease ends but its writer may still run."""
        del self._leases[lease.grant]
        self._doubt.setdefault((lease.transfer, lease.peer), []).append(lease.slot)

    def clear(self, transfer: str, peer: Peer) -> None:
        """The peer's writers of this transfer have ended, for certain."""
        for slot in self._doubt.pop((transfer, peer), []):
            self._give_back(slot, peer)

    def clear_dead(self, peer: Peer) -> None:
        """The peer's process has ended, for certain."""
        for transfer, owner in [key for key in self._doubt if key[1] == peer]:
            self.clear(transfer, owner)

    @property
    def in_quarantine(self) -> list[tuple[str, Peer]]:
        return list(self._doubt)

    @property
    def doubts(self) -> frozenset[Peer]:
        """Peers with a writer in doubt."""
        return frozenset(peer for _, peer in self._doubt)

    def in_doubt(self, transfer: str, peer: Peer) -> bool:
        return (transfer, peer) in self._doubt

    @property
    def leases(self) -> int:
        """Grants that peers hold now."""
        return len(self._leases)

    def counts(self) -> dict[str, int]:
        doubt = [slot for slots in self._doubt.values() for slot in slots]
        return {
            "slots_free": len(self._free),
            "slots_used": sum(lease.slot is not None for lease in self._leases.values()),
            "slots_quarantined": sum(slot is not None for slot in doubt),
            "pieces_quarantined": sum(slot is None for slot in doubt),
        }

    def _give_back(self, slot: int | None, peer: Peer) -> None:
        if slot is None:
            return
        self._free.append(slot)
        self._per_peer[peer] -= 1
        if not self._per_peer[peer]:
            del self._per_peer[peer]
