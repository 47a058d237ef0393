"""What both halves of the state machine share: peers, handshakes, acknowledged aborts, counters."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvferry.errors import (
    DocumentError,
    IncompatibleError,
    KVFerryError,
    PeerLost,
    TransferAborted,
    TransferCorrupted,
    TransferError,
    TransferRefused,
    TransferTimeout,
    TransportError,
    Where,
)
from kvferry.layout.address import Address
from kvferry.layout.document import Instance
from kvferry.layout.validate import check_instance
from kvferry.session.delivery import KEEP_S, Delivery
from kvferry.session.events import Action, Close, Note, Open, Watch
from kvferry.session.messages import Abort, AbortAck, Card, FailureKind, Hello, Message, Peer, Role, Welcome
from kvferry.session.reach import line_problem
from kvferry.session.slots import Ledger

ATTEMPT = 1
HELLO_S = 1.0
HELLO_MAX_S = 30.0
REMEMBERED = 65_536
PEER_LIMIT = 1_000
CYCLE_RANKS = 65_536
EARLIER_LIMIT = 64
"""Earlier starts that are still answered, all workers together: one that starts again and again leaves no more."""
EARLY_LIMIT = 4_096
"""Transfers that a peer may start before our own call, all peers together."""

ERRORS: dict[FailureKind, type[TransferError]] = {
    "aborted": TransferAborted,
    "refused": TransferRefused,
    "timeout": TransferTimeout,
    "lost": PeerLost,
    "corrupted": TransferCorrupted,
}


ADVICE: dict[FailureKind, str] = {
    "aborted": "nothing was committed; if it is still wanted, start it again under a new id",
    "refused": "nothing was committed; change what is named here, and start it again under a new id",
    "lost": "nothing was committed; start it again under a new id: the peer's next start is found at once",
    "corrupted": "don't use these pages: compute the prompt again, and check memory and network between the two",
}
LATE: dict[str, str] = {
    "preparing": "check that all workers of both instances run and register at the registry that was named",
    "matching": "check that the other side has been given this request, under the same id",
    "moving": "check that the peer runs, how busy it is, and the network between",
    "landing": "check how busy this worker is",
    "verifying": "check how busy this worker is",
    "committing": "check that every rank of the target has been given this request, and runs",
}
"""What to check where the deadline has passed, by phase."""


def kind_of(error: KVFerryError) -> FailureKind:
    """How an error is told to peers: a transport that fails is a lost peer, what is no end of a transfer a refusal."""
    if isinstance(error, TransportError):
        return "lost"
    return next((kind for kind, known in ERRORS.items() if isinstance(error, known)), "refused")


def advice(kind: FailureKind, phase: str) -> str:
    return LATE.get(phase, "") if kind == "timeout" else ADVICE[kind]


def failure(kind: FailureKind, where: Where, problem: str, cause: BaseException | None = None) -> TransferError:
    error = ERRORS[kind](where, problem, advice(kind, where.phase))
    error.__cause__ = cause
    return error


def told_by(peer: Peer, body: Abort) -> str:
    """The problem, as our own caller is told it."""
    if body.kind == "aborted":
        return body.reason if body.reason.startswith("aborted by ") else f"aborted by {peer}: {body.reason}"
    return f"{peer} says: {body.reason}"


@dataclass
class _Hello:
    """Said again until it is answered, since only then there is a line that messages can be numbered on."""

    next_s: float
    interval_s: float
    until_s: float


class Memory:
    """Which transfers have ended here, `REMEMBERED` of them: None for success, else the kind and the reason.

    What peers tell of ids that nobody called here counts as theirs. Whoever has the most here is forgotten first, so
    that a peer's flood pushes out its own.
    """

    def __init__(self) -> None:
        self._owners: dict[str, Peer | None] = {}
        self._ends: dict[Peer | None, OrderedDict[str, tuple[FailureKind, str] | None]] = {}

    def add(self, transfer: str, end: tuple[FailureKind, str] | None, owner: Peer | None = None) -> None:
        """`owner`: the peer that told of it, None where it was called here."""
        if transfer in self._owners:
            self._forget(transfer)
        self._owners[transfer] = owner
        self._ends.setdefault(owner, OrderedDict())[transfer] = end
        if len(self._owners) > REMEMBERED:
            most = max(self._ends.values(), key=len)
            self._forget(next(iter(most)))

    def _forget(self, transfer: str) -> None:
        owner = self._owners.pop(transfer)
        del self._ends[owner][transfer]
        if not self._ends[owner]:
            del self._ends[owner]

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._owners

    def __getitem__(self, transfer: str) -> tuple[FailureKind, str] | None:
        return self._ends[self._owners[transfer]][transfer]


class Core:
    def __init__(
        self,
        me: Peer,
        card: Card,
        slots: int,
        slot_address: Callable[[int], Address],
        draw_grant: Callable[[], bytes],
        allowed: Collection[str] = (),
    ) -> None:
        """`allowed`: public keys of those who may talk to us; empty where we have no keys."""
        self._allowed = allowed
        self.me, self.card, self.slot_address, self.draw_grant = me, card, slot_address, draw_grant
        self.ledger = Ledger(slots)
        self.now = -math.inf
        self.out: list[Action] = []
        self.known: dict[Peer, Card] = {}
        self.problems: dict[Peer, str] = {}  # why a handshake failed
        self.superseded: dict[Peer, float] = {}  # earlier starts, and how long they are answered at least
        self.counters: Counter[str] = Counter()
        self._hellos: dict[Peer, _Hello] = {}
        self._opened: set[Peer] = set()
        self._ask_writers_s = math.inf
        self.delivery = Delivery(lambda action: self.out.append(action), lambda: self.now, self.ledger.in_doubt)

    def send(self, peer: Peer, body: Message) -> None:
        self.delivery.say(peer, body)

    def refuse(self, reason: str) -> None:
        """A message is dropped. The log gets the first few of each kind only, so that a flood can't fill it."""
        self.counters["refused_messages"] += 1
        self.counters[f"refused: {reason}"] += 1
        if self.counters[f"refused: {reason}"] <= 10:
            self.out.append(Note(f"message refused: {reason}"))

    # handshake

    def key_of(self, peer: Peer, body: Message) -> str:
        """The public key that a message of the peer has to come with; empty without keys."""
        if isinstance(body, (Hello, Welcome)):
            return body.card.key
        return self.known[peer].key if peer in self.known else ""

    def knows(self, peer: Peer, key: str) -> bool:
        """Whether the holder of `key` has shaken hands with us as this peer."""
        return peer in self.known and self.known[peer].key == key

    @property
    def greeting(self) -> int:
        """Peers that have not answered our hello yet."""
        return len(self._hellos)

    def hello(self, peer: Peer, address: str, key: str, until_s: float) -> None:
        """Say hello until the peer answers or `until_s` has passed. `address`, `key`: where it is, as registered."""
        if any(_is_earlier(peer, known) and card.key == key for known, card in self.known.items()):
            return  # whoever told us of it is about to hear of the later start
        if peer in self.known:
            self.problems[peer] = (
                f"the registry names the public key {key!r} for {peer}, which came with {self.known[peer].key!r}"
            )
            return
        pending = self._hellos.get(peer)
        if pending is not None:
            pending.until_s = max(pending.until_s, until_s)
            return
        problem = self._open(peer, address, key)
        if problem:
            self.problems[peer] = problem
            return
        self._hellos[peer] = _Hello(self.now + HELLO_S, HELLO_S, until_s)
        self.send(peer, Hello(self.card))

    def on_hello(self, peer: Peer, body: Hello) -> bool:
        """Whether the peer is known now that was not before."""
        new = self._accept(peer, body.card)
        if peer in self.known:
            self.send(peer, Welcome(self.card))
        return new

    def on_welcome(self, peer: Peer, body: Welcome) -> bool:
        if peer not in self._hellos and peer not in self.known:  # two hellos that crossed bring a welcome too many
            self.refuse("welcome without a hello")
            return False
        return self._accept(peer, body.card)

    def _accept(self, peer: Peer, card: Card) -> bool:
        if peer in self.known:
            if self.known[peer] != card:
                self.refuse("a peer changed its layout without a new generation")
            return False
        problem = _card_problem(peer, card) or self._superseded_by(peer, card)
        problem = problem or self._open(peer, card.address, card.key)
        if problem:
            if self._hellos.pop(peer, None) is not None:  # strangers leave nothing behind here
                self.problems[peer] = problem
                self._hang_up(peer)
            self.refuse("handshake with a bad card")
            return False
        self._hellos.pop(peer, None)
        self.problems.pop(peer, None)
        self.known[peer] = card
        self._give_up_earlier_starts(peer)
        self.delivery.open(peer)
        if card.process is not None:
            self.out.append(Watch(peer, card.process))
        return True

    def earlier_starts(self, peer: Peer) -> list[Peer]:
        """Of the same worker, with the same key: whoever holds another one is another worker by the same name."""
        key = self.known[peer].key
        return [p for p, card in self.known.items() if _is_earlier(p, peer) and card.key == key]

    def supersede(self, peer: Peer) -> None:
        self.superseded.setdefault(peer, self.now + KEEP_S)

    def outlived(self) -> list[Peer]:
        """Earlier starts that need no answer of us any more, nor we one of them. Until then they may come back from a
        pause, and hold slots of theirs until we say that we don't write there.
        """
        if not self.superseded:
            return []
        doubts, crowd = self.ledger.doubts, set(list(self.superseded)[:-EARLIER_LIMIT])
        over = [peer for peer, until_s in self.superseded.items() if until_s <= self.now or peer in crowd]
        return [p for p in over if p not in doubts and (p in crowd or not self.delivery.unheard(p))]

    def _superseded_by(self, peer: Peer, card: Card) -> str:
        later = next((p for p, known in self.known.items() if _is_earlier(peer, p) and known.key == card.key), None)
        return f"a later start of this worker is known, {later}" if later else ""

    def _give_up_earlier_starts(self, peer: Peer) -> None:
        """A worker that has answered has no earlier start that would."""
        for old in list(self._hellos):
            if _is_earlier(old, peer):
                del self._hellos[old]
                self._hang_up(old)

    def barred(self, peer: Peer, problem: str) -> None:
        """The peer's socket has refused our line for good."""
        if self._hellos.pop(peer, None) is not None:
            self.problems[peer] = problem
            self._hang_up(peer)
        else:
            self.refuse(f"a peer has barred our line: {problem}"[:200])

    def _open(self, peer: Peer, address: str, key: str) -> str:
        """Why there is no line to the peer, or nothing."""
        if peer in self._opened:
            return ""
        problem = line_problem(self.card.address, self._allowed, address, key)
        if problem:
            return problem
        if len(self._opened) >= PEER_LIMIT:
            return f"{PEER_LIMIT} peers are connected already"
        self._opened.add(peer)
        self.out.append(Open(peer, address, key))
        return ""

    def forget(self, peer: Peer) -> None:
        """The peer is dead, or has signed off: nothing of it can touch our slots, and nothing can be said to it.

        Over UCX tcp a dead peer's last bytes may still lie in our sockets. The shell waits before it reports a death,
        and that was enough in all tries (docs/transports/nixl.md); it is no proof.
        """
        self.known.pop(peer, None)
        self._hellos.pop(peer, None)
        self.superseded.pop(peer, None)
        for earlier in [one for one in self.superseded if not self._superseded_by(one, self.known[one])]:
            del self.superseded[earlier]  # it is the latest again
        self.ledger.clear_dead(peer)
        self.delivery.close(peer)
        self._hang_up(peer)

    def _hang_up(self, peer: Peer) -> None:
        """Close the line, so that peers that never answered don't use up `PEER_LIMIT`."""
        if peer in self._opened:
            self._opened.discard(peer)
            self.out.append(Close(peer))

    def instance(self, peers: tuple[Peer, ...]) -> Instance:
        """One document from the cards of all workers; IncompatibleError where the workers disagree among themselves."""
        cards = [self.card.instance if peer == self.me else self.known[peer].instance for peer in peers]
        first = cards[0]
        for peer, card in zip(peers, cards):
            for field in ("model", "groups"):
                mine, other = getattr(first, field), getattr(card, field)
                if mine != other:
                    advice = f"start all workers of {first.instance!r} with the same model and cache"
                    raise IncompatibleError(
                        f"{field} of worker {peer.rank} against worker {peers[0].rank}", other, mine, advice
                    )
        workers = tuple(worker for card in cards for worker in card.workers)
        return Instance(first.format, first.instance, first.model, first.groups, workers)

    # the end of a transfer

    def abort(self, peer: Peer, role: Role, transfer: str, kind: FailureKind, reason: str) -> None:
        """Tell the peer, whose role is `role`."""
        self.send(peer, Abort(transfer, ATTEMPT, role, kind, reason[:4000]))

    def on_abort_ack(self, peer: Peer, ack: AbortAck) -> None:
        self.ledger.clear(ack.transfer, peer)

    def _ask_writers(self) -> None:
        """A peer in doubt that has heard of the end gave up telling us when we said nothing for `KEEP_S`: ask again."""
        doubts, due = self.ledger.in_quarantine, self._ask_writers_s <= self.now
        for transfer, peer in doubts if due else ():
            if not self.delivery.unheard(peer, transfer):
                self.abort(peer, "source", transfer, "aborted", "it has ended here; does anybody still write for it?")
        if not doubts:
            self._ask_writers_s = math.inf
        elif due or self._ask_writers_s == math.inf:
            self._ask_writers_s = self.now + KEEP_S

    def tick(self) -> None:
        self._ask_writers()
        for peer, hello in list(self._hellos.items()):
            if hello.until_s <= self.now:
                del self._hellos[peer]
                self._hang_up(peer)
            elif hello.next_s <= self.now:
                self.send(peer, Hello(self.card))
                hello.interval_s = min(2 * hello.interval_s, HELLO_MAX_S)
                hello.next_s = self.now + hello.interval_s

    @property
    def quiet(self) -> bool:
        """Whether our peers have heard all, and no writer of theirs is in doubt."""
        return self.delivery.quiet and not self.ledger.doubts

    def next_s(self) -> float:
        hellos = (hello.next_s for hello in self._hellos.values())
        return min(self.delivery.next_s(), self._ask_writers_s, *hellos)


def _is_earlier(one: Peer, other: Peer) -> bool:
    return (one.instance, one.rank) == (other.instance, other.rank) and one.generation < other.generation


def _card_problem(peer: Peer, card: Card) -> str:
    """Why a peer's card can't be used, or nothing."""
    ranks = [worker.rank for worker in card.instance.workers]
    if ranks != [peer.rank] or card.instance.instance != peer.instance or peer.rank >= card.world:
        return f"its card describes ranks {ranks} of {card.instance.instance!r} in a world of {card.world}"
    try:
        check_instance(card.instance)
    except (DocumentError, RecursionError) as error:
        return str(error)
    size = max((pool.cycle[1] for worker in card.instance.workers for pool in worker.pools), default=1)
    if size > CYCLE_RANKS:  # routing looks at each of them
        return f"its tokens are shared out over {size} ranks, at most {CYCLE_RANKS} are accepted"
    return ""
