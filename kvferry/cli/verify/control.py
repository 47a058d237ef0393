"""How `kvferry verify` tells workers on any host what to do: one question, one answer, over the control sockets that
endpoints use, so only holders of the deployment's keys are heard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Union

import msgspec
import zmq

from kvferry.cli.verify.cases import Case
from kvferry.cli.verify.synthetic import Outcome, Share
from kvferry.errors import DocumentError, EngineError, KVFerryError, WorkerFailed
from kvferry.layout.document import Instance, decode_msgpack, encode_msgpack
from kvferry.session.keys import Access
from kvferry.session.lines import Lines
from kvferry.session.messages import Peer
from kvferry.session.reach import line_problem
from kvferry.session.registry import Entry

VERSION = 1
Version = Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of the questions and answers."""


class Describe(_Body, frozen=True):
    """→ Described"""


class Expect(_Body, frozen=True):
    """What each source worker brings to you. → Done"""

    shares: tuple[Share, ...]


class Fill(_Body, frozen=True):
    """→ Done"""

    case: Case


class Send(_Body, frozen=True):
    """→ Ended"""

    case: Case
    transfer: str
    timeout_s: float


class Receive(_Body, frozen=True):
    """→ Ended"""

    case: Case
    transfer: str
    source: str
    timeout_s: float


class Described(_Body, frozen=True):
    """The instance with this worker only."""

    instance: Instance
    world: int


class Done(_Body, frozen=True):
    """It has been done."""


class Ended(_Body, frozen=True):
    outcome: Outcome


class Problem(_Body, frozen=True):
    """It could not be done."""

    text: str


Question = Union[Describe, Expect, Fill, Send, Receive]
Answer = Union[Described, Done, Ended, Problem]


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """`address`, `key`: where the answer goes."""

    version: Version
    number: int
    sender: Peer
    address: str
    key: str
    body: Question


class _Answered(msgspec.Struct, frozen=True, array_like=True):
    version: Version
    number: int
    sender: Peer
    body: Answer


class Listener:
    """The worker's side, used by one thread."""

    def __init__(self, me: Peer, at: Access) -> None:
        self._me, self._at = me, at
        self._poller = zmq.Poller()
        self._lines = Lines(at, self._poller)
        self._known: set[Peer] = set()
        self.address = self._lines.address
        self.key = at.keys.public if at.keys else ""

    def serve(self, act: Callable[[Question], Answer], wait_s: float) -> None:
        """Answer what has come within `wait_s`. What can't be read, or comes with another key, is dropped."""
        self._poller.poll(math.ceil(wait_s * 1000))
        self._lines.handshakes()
        while True:
            try:
                frames, key = self._lines.receive()
                asked = decode_msgpack(frames[0] if len(frames) == 1 else b"", _Asked)
            except zmq.Again:
                return
            except DocumentError:
                continue
            allowed = self._at.keys.allowed if self._at.keys else frozenset()
            if asked.key == key and not line_problem(self.address, allowed, asked.address, key):
                self._answer(asked, act)

    def _answer(self, asked: _Asked, act: Callable[[Question], Answer]) -> None:
        try:
            body = act(asked.body)
        except KVFerryError as error:
            body = Problem(str(error))
        except Exception as error:  # a mistake in one case must not end the worker
            body = Problem(f"{type(error).__name__}: {error}")
        if asked.sender not in self._known:
            for old in self._known:  # a new driver: the one before has gone
                self._lines.close(old)
            self._known = {asked.sender}
            self._lines.open(asked.sender, asked.address, asked.key)
        self._lines.send(asked.sender, encode_msgpack(_Answered(VERSION, asked.number, self._me, body)))

    def close(self) -> None:
        self._lines.close_all(linger_ms=500)
        self._lines.end()


class Caller:
    """The driver's side. `me` is unique to this run."""

    def __init__(self, me: Peer, at: Access) -> None:
        self._me, self._at = me, at
        self._poller = zmq.Poller()
        self._lines = Lines(at, self._poller)
        self._number = 0

    def open(self, entry: Entry) -> Peer:
        """A line to a worker. WorkerFailed where there can be none."""
        peer = Peer(entry.instance, entry.generation, entry.rank)
        allowed = self._at.keys.allowed if self._at.keys else frozenset()
        problem = line_problem(self._lines.address, allowed, entry.address, entry.key)
        if problem:
            raise WorkerFailed(str(peer), problem)
        self._lines.open(peer, entry.address, entry.key)
        return peer

    def ask(self, questions: Mapping[Peer, Question], timeout_s: float) -> dict[Peer, Answer]:
        """All at once. WorkerFailed for the first that can't do it, refuses our line, or does not answer in time."""
        key = self._at.keys.public if self._at.keys else ""
        waiting: dict[int, Peer] = {}
        for peer, body in questions.items():
            self._number += 1
            waiting[self._number] = peer
            asked = _Asked(VERSION, self._number, self._me, self._lines.address, key, body)
            self._lines.send(peer, encode_msgpack(asked))
        answers: dict[Peer, Answer] = {}
        end_s = time.monotonic() + timeout_s
        while waiting:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                silent = ", ".join(map(str, waiting.values()))
                raise EngineError(f"no answer within {timeout_s:g} s from {silent}; is it still running there?")
            self._poller.poll(math.ceil(left_s * 1000))
            for peer, problem in self._lines.handshakes():
                raise WorkerFailed(str(peer), f"it refuses our line: {problem}")
            for number, answer in self._heard():
                if number in waiting:
                    answers[waiting.pop(number)] = answer
        for peer, answer in answers.items():
            if isinstance(answer, Problem):
                raise WorkerFailed(str(peer), answer.text)
        return answers

    def _heard(self) -> Sequence[tuple[int, Answer]]:
        found: list[tuple[int, Answer]] = []
        while True:
            try:
                frames, _ = self._lines.receive()
                answered = decode_msgpack(frames[0] if len(frames) == 1 else b"", _Answered)
                found.append((answered.number, answered.body))
            except zmq.Again:
                return found
            except DocumentError:
                continue

    def close(self) -> None:
        self._lines.close_all(linger_ms=500)
        self._lines.end()
