"""Nothing that is said about a transfer gets lost, and who says nothing is noticed. Pure, as all of the state machine.

What we say to a peer about transfers is numbered, and kept until the peer has heard it. Every message carries the
newest number heard from its receiver, a `Beat` only that. While something runs with a peer, or something that it was
told may not have been heard, it is asked for a beat whenever it was quiet for `BEAT_S`; its answer shows what has to be
said again. So only what is known to be lost is repeated, in order, and each message arrives once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.session.events import Action, Note, Send
from kvferry.session.messages import NO_PLACE, Abort, AbortAck, About, Beat, Commit, Complete, Message, Peer, Place

BEAT_S = 1.0
"""A peer that was quiet for so long is asked for a sign of life."""
BEAT_MAX_S = 5.0
"""A silent peer is asked less and less often, down to this interval."""
SILENT_S = 3.0
"""After so long without a word, and two questions, a peer counts as silent."""
HEARD_S = 0.1
"""What was heard is acknowledged by the next message, or after so long by a beat."""
KEEP_S = 600.0
"""How long a peer that says nothing is to be told of the end of a transfer that holds nothing here any more."""
ENDS = (Abort, AbortAck, Commit, Complete)
"""What is said of a transfer's end. All else about it loses its meaning with the end, see `Delivery.drop`."""
SAID_LIMIT = 16_384
"""Messages that are kept for a peer that doesn't hear; the oldest is given up then."""


@dataclass
class _Said:
    number: int
    body: Message
    at_s: float
    until_s: float


@dataclass
class _Line:
    word_s: float  # when the peer last said anything
    heard: int = 0  # the newest number that we have heard
    number: int = 0  # the newest that we have said
    answered: int = 0  # the newest of ours that the peer has heard
    said: list[_Said] = field(default_factory=list)  # and perhaps not heard
    owed_s: float = math.inf  # when we acknowledge at the latest
    ask_s: float = math.inf  # when we ask next
    asked_s: float = -math.inf  # when we last asked
    asked: int = 0  # since the last word
    noted: bool = False


class Delivery:
    """`act` takes what is to be done, `now` tells the machine's time, `holds` whether slots or pages are in doubt until
    this peer answers for this transfer.
    """

    def __init__(
        self, act: Callable[[Action], None], now: Callable[[], float], holds: Callable[[str, Peer], bool]
    ) -> None:
        self._act, self._now, self._holds = act, now, holds
        self._lines: dict[Peer, _Line] = {}
        self._due_s = math.inf
        self.repeated = 0

    def open(self, peer: Peer) -> None:
        self._lines[peer] = _Line(self._now())

    def close(self, peer: Peer) -> None:
        self._lines.pop(peer, None)

    def say(self, peer: Peer, body: Message) -> None:
        line, place = self._lines.get(peer), NO_PLACE
        if line is not None:
            if isinstance(body, About):
                until_s = self._now() + KEEP_S if isinstance(body, ENDS) else math.inf
                line.number += 1
                line.said.append(_Said(line.number, body, self._now(), until_s))
                del line.said[:-SAID_LIMIT]
                if len(line.said) == 1:
                    self._ask_by(line, self._now() + BEAT_S)
            place = self._place(line, len(line.said) - 1 if isinstance(body, About) else None)
        self._act(Send(peer, body, place))

    def drop(self, transfer: str, kinds: tuple[type[About], ...]) -> None:
        """What was said of `kinds` about a transfer has lost its meaning."""
        for line in self._lines.values():
            line.said = [s for s in line.said if not (isinstance(s.body, kinds) and s.body.transfer == transfer)]

    def hear(self, peer: Peer, place: Place) -> bool:
        """Whether the message that came with this place is new and next; whatever it is, the peer lives."""
        line, now = self._lines[peer], self._now()
        line.word_s, line.asked = now, 0
        if line.noted:
            line.noted = False
            self._act(Note(f"{peer} is heard again"))
        answered = min(place.heard, line.number)
        if answered > line.answered:
            line.answered = answered
            line.said = [said for said in line.said if said.number > answered]
            line.ask_s = math.inf
        if not line.said or line.ask_s == math.inf:
            line.ask_s = math.inf
            self._ask_by(line, now + BEAT_S)
        if place.number == 0:
            return True
        line.owed_s = min(line.owed_s, now + HEARD_S)
        self._due_s = min(self._due_s, line.owed_s)
        if not place.after <= line.heard < place.number:
            return False  # heard before, or one before it is missing and will be repeated together with this one
        line.heard = place.number
        return True

    def on_beat(self, peer: Peer, beat: Beat) -> None:
        line = self._lines[peer]
        if beat.ask:
            return self.say(peer, Beat(False))
        lost = [index for index, said in enumerate(line.said) if said.at_s <= line.asked_s]
        for index in lost:  # it has heard our question, which came after them
            line.said[index].at_s = self._now()
            self.repeated += 1
            self._act(Send(peer, line.said[index].body, self._place(line, index)))

    def silent_s(self, peer: Peer) -> float:
        """How long the peer has said nothing although it was asked; 0 where it is not known to be silent."""
        line = self._lines.get(peer)
        quiet_s = self._now() - line.word_s if line is not None and line.asked >= 2 else 0.0
        return quiet_s if quiet_s >= SILENT_S else 0.0

    def silent(self) -> dict[Peer, float]:
        found = {peer: self.silent_s(peer) for peer in self._lines}
        return {peer: quiet_s for peer, quiet_s in found.items() if quiet_s}

    def ask_all(self) -> None:
        """Now, where anything may not have been heard."""
        for line in self._lines.values():
            if line.said:
                line.ask_s = self._due_s = self._now()

    def unheard(self, peer: Peer, transfer: str | None = None) -> bool:
        """Whether the peer may not have heard all that it was told, of this transfer or of any."""
        line = self._lines.get(peer)
        said = [] if line is None else line.said
        return any(transfer is None or getattr(s.body, "transfer", None) == transfer for s in said)

    @property
    def quiet(self) -> bool:
        """Whether all that was said has been heard."""
        return not any(line.said for line in self._lines.values())

    def next_s(self) -> float:
        return self._due_s

    def tick(self, busy: Callable[[Peer], bool]) -> None:
        """`busy`: whether something runs with a peer."""
        if self._now() < self._due_s:
            return
        for peer, line in self._lines.items():
            if line.owed_s <= self._now():
                self.say(peer, Beat(False))
            if line.ask_s <= self._now():
                self._ask(peer, line, busy)
        self._due_s = min((min(line.ask_s, line.owed_s) for line in self._lines.values()), default=math.inf)

    def _ask(self, peer: Peer, line: _Line, busy: Callable[[Peer], bool]) -> None:
        now, runs = self._now(), busy(peer)
        # what is due is kept for one more question: we may be the ones who stood still meanwhile
        over = [s for s in line.said if s.until_s <= line.asked_s]
        gone = {s.number for s in over if not self._holds(getattr(s.body, "transfer", ""), peer)}
        line.said = [s for s in line.said if s.number not in gone] if gone else line.said
        if not line.said and not runs:
            line.ask_s, line.asked = math.inf, 0
            return
        line.asked += 1
        line.asked_s = now
        line.ask_s = now + min(BEAT_S * 2 ** min(max(0, line.asked - 4), 8), BEAT_MAX_S)
        if runs and self.silent_s(peer) and not line.noted:
            line.noted = True
            self._act(Note(f"no word from {peer} for {now - line.word_s:.1f} s; what runs with it goes on"))
        self.say(peer, Beat(True))

    def _ask_by(self, line: _Line, at_s: float) -> None:
        line.ask_s = min(line.ask_s, at_s)
        self._due_s = min(self._due_s, line.ask_s)

    def _place(self, line: _Line, index: int | None) -> Place:
        """Of the message `said[index]`, or of one without a number. It acknowledges what was heard."""
        line.owed_s = math.inf
        if index is None:
            return Place(heard=line.heard)
        after = line.said[index - 1].number if index else line.answered
        return Place(line.said[index].number, after, line.heard)
