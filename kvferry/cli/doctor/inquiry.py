"""Shaking hands with workers as an endpoint does, to see what they say of themselves. They forget it at the goodbye.

Nothing is registered and nothing of a worker's is used but its control socket.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import zmq

from kvferry.errors import DocumentError
from kvferry.layout.presets import uniform_instance
from kvferry.session.keys import Access
from kvferry.session.lines import Lines
from kvferry.session.messages import Card, Goodbye, Hello, Message, Peer, Welcome, decode, encode
from kvferry.session.reach import host_of, line_problem
from kvferry.session.registry import Entry

CONNECT_S = 2.0
HELLO_S = 3.0
PINGS = 5
GREETING_BYTES = 10
"""What a ZeroMQ socket says by itself as soon as somebody connects (ZMTP 3.1: 0xff, 8 bytes, 0x7f)."""
SOCKETS_AT_ONCE = 32


@dataclass(frozen=True)
class Answer:
    """`card` is None where the worker did not answer; then `problem` and `cure` say why."""

    entry: Entry
    card: Card | None = None
    ping_s: float = 0.0
    problem: str = ""
    cure: str = ""

    @property
    def peer(self) -> Peer:
        return peer_of(self.entry)


def peer_of(entry: Entry) -> Peer:
    return Peer(entry.instance, entry.generation, entry.rank)


def ask_workers(entries: Sequence[Entry], at: Access) -> list[Answer]:
    """One answer for each, in order. Takes CONNECT_S + HELLO_S at most."""
    poller = zmq.Poller()
    lines = Lines(at, poller)
    try:
        with ThreadPoolExecutor(SOCKETS_AT_ONCE) as pool:
            answers = list(pool.map(lambda entry: _reachable(entry, at, lines.address), entries))
        asked = {answer.peer: answer for answer in answers if not answer.problem}
        heard = _shake_hands(asked, at, lines, poller)
        return [heard.get(answer.peer, answer) for answer in answers]
    finally:
        lines.close_all(linger_ms=500)
        lines.end()


def _reachable(entry: Entry, at: Access, own_address: str) -> Answer:
    """Whether a worker's socket accepts a connection and greets."""
    allowed = at.keys.allowed if at.keys else frozenset()
    problem = line_problem(own_address, allowed, entry.address, entry.key)
    if problem:
        return Answer(entry, problem=problem, cure="the line above names what to set or to copy; docs/security.md")
    port = int(entry.address.rpartition(":")[2])
    try:
        with socket.create_connection((host_of(entry.address), port), CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            greeting = connection.recv(GREETING_BYTES)
    except TimeoutError:
        problem = f"{entry.address} does not answer within {CONNECT_S:g} s: its process is stopped, or a firewall drops"
        return Answer(entry, problem=problem, cure="continue or restart that process; open its ports to this host")
    except OSError as error:
        problem = f"unreachable address: {entry.address}: {error.strerror or error}"
        cure = (
            "if that worker runs, set its KVFERRY_HOST to an address that this host reaches, and open its ports; if it "
            "has ended, it did not sign off, and its entry expires by itself"
        )
        return Answer(entry, problem=problem, cure=cure)
    if greeting[:1] != b"\xff":
        problem = f"{entry.address} is not a worker's control socket, something else listens there"
        return Answer(entry, problem=problem, cure="the worker has ended; its entry expires by itself")
    return Answer(entry)


def _shake_hands(asked: dict[Peer, Answer], at: Access, lines: Lines, poller: zmq.Poller) -> dict[Peer, Answer]:
    me = Peer(f"doctor-{secrets.token_hex(4)}", time.time_ns(), 0)
    own = uniform_instance(me.instance, 1, 1, 1, 1, page_tokens=1, pages=1)
    hello = Hello(Card(lines.address, 1, own, b"", key=at.keys.public if at.keys else ""))
    sent_s: dict[Peer, float] = {}
    pings: dict[Peer, list[float]] = {peer: [] for peer in asked}
    waiting = set(asked)

    def say(peer: Peer, body: Message) -> None:
        sent_s[peer] = time.monotonic()
        lines.send(peer, encode(me, peer, body))

    for peer, answer in asked.items():
        lines.open(peer, answer.entry.address, answer.entry.key)
        say(peer, hello)
    end_s = time.monotonic() + HELLO_S
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        poller.poll(math.ceil(left_s * 1000))
        for peer, problem in lines.handshakes():
            cure = "the line above names the file to copy; docs/security.md"
            asked[peer] = replace(asked[peer], problem=f"it refuses our line: {problem}", cure=cure)
            waiting.discard(peer)
        for sender, card, problem in _heard(lines, asked):
            if problem:
                asked[sender] = replace(asked[sender], problem=problem, cure="run the same release on both sides")
                waiting.discard(sender)
            elif card is not None and sender in waiting:
                pings[sender].append(time.monotonic() - sent_s[sender])
                asked[sender] = replace(asked[sender], card=card, ping_s=min(pings[sender]))
                if len(pings[sender]) == PINGS:
                    waiting.discard(sender)
                else:
                    say(sender, hello)
    for peer, answer in asked.items():
        if answer.card is not None:
            say(peer, Goodbye())
        elif not answer.problem:
            asked[peer] = _silent(answer)
    return asked


def _heard(lines: Lines, asked: dict[Peer, Answer]) -> list[tuple[Peer, Card | None, str]]:
    """(sender, its card, what is wrong with it) of the messages that have come."""
    found: list[tuple[Peer, Card | None, str]] = []
    while True:
        try:
            frames, key = lines.receive()
        except zmq.Again:
            return found
        try:
            envelope = decode(frames[0]) if len(frames) == 1 else None
        except DocumentError as error:
            found += [(peer, None, f"it says what this side can't read: {error}") for peer in asked if len(asked) == 1]
            continue
        if envelope is None or envelope.sender not in asked or not isinstance(envelope.body, Welcome):
            continue
        entry, card = asked[envelope.sender].entry, envelope.body.card
        if key == entry.key == card.key:
            found.append((envelope.sender, card, ""))


def _silent(answer: Answer) -> Answer:
    problem = (
        f"stale generation: a worker listens at {answer.entry.address} but does not answer as generation "
        f"{answer.entry.generation}; it is another start, or it hangs"
    )
    cure = "end the earlier start of this worker, or restart it if it hangs; the entry of an ended one expires"
    return replace(answer, problem=problem, cure=cure)
