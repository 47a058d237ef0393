"""Every error that kvferry raises on purpose.

Each one names what it is about (request, worker, field), both values where two sides disagree, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


class KVFerryError(Exception):
    """Base of all errors that kvferry raises on purpose; the command line turns each into one line."""


class AddressError(KVFerryError):
    """An address or size is negative, not an integer, or leaves the range 0 … 2**64."""


class DocumentError(KVFerryError):
    """A document is malformed. `path` names the field, as in `workers[2].pools[0].modes[1][2]`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class IncompatibleError(KVFerryError):
    """Two instances disagree on something both must share; raised at the handshake, before any request."""

    def __init__(self, field: str, source: object, target: object, advice: str) -> None:
        super().__init__(f"{field}: source has {source!r}, target has {target!r}; {advice}")
        self.field = field
        self.source = source
        self.target = target


class PlanError(KVFerryError):
    """A request can't be served so that each wanted byte is written exactly once; nothing was moved."""


class ProofError(PlanError):
    """A program or its copies break a promise of the plan: out of bounds, twice, missing, or the wrong bytes."""


class TransportError(KVFerryError):
    """Bytes could not be moved; whether some arrived is unknown, so the landing memory stays in quarantine."""


class TransportUnavailable(TransportError):
    """This transport can't be used between these two processes; the message says why."""


class CutOff(TransportError):
    """The other side has ended this write or its connection. If it lives, it says why a moment later."""


class MissingExtra(KVFerryError):
    """An optional dependency is not installed; the message names the extra to install."""


class RegistryError(KVFerryError):
    """The registry can't be reached or refuses an entry."""


class KeysError(KVFerryError):
    """Keys are missing, unreadable or open to others, or something needs keys that has none."""


@dataclass(frozen=True)
class Where:
    """What a transfer's terminal error is about. `peer` is `instance/generation/rank`; only the
    instance where no worker of it is known yet, empty where not even that is.
    """

    transfer: str
    peer: str
    phase: str
    elapsed_s: float

    def __str__(self) -> str:
        peer = f" with {self.peer}" if self.peer else ""
        return f"transfer {self.transfer!r}{peer}, phase {self.phase}, after {self.elapsed_s:.3f} s"


class TransferError(KVFerryError):
    """A transfer ended without success. `advice`: what to do or to check now."""

    def __init__(self, where: Where, problem: str, advice: str = "") -> None:
        super().__init__(f"{where}: {problem}" + (f"; {advice}" if advice else ""))
        self.where = where
        self.problem = problem
        self.advice = advice


class TransferTimeout(TransferError):
    """The transfer's one deadline passed."""


class TransferRefused(TransferError):
    """The peer, or our own plan, refuses this transfer."""


class TransferAborted(TransferError):
    """One side aborted the transfer."""


class PeerLost(TransferError):
    """The peer is gone, or came back under another generation."""


class TransferCorrupted(TransferError):
    """What arrived is not what was sent: the digests differ."""


class EngineError(KVFerryError):
    """An engine adapter can't do what it was asked: a size that doesn't fit the model, no free page, no model there."""


class WorkerFailed(EngineError):
    """A worker process of an engine reported an error or ended. `worker` names it."""

    def __init__(self, worker: str, problem: str) -> None:
        super().__init__(f"{worker}: {problem}")
        self.worker = worker
        self.problem = problem
