"""The control sockets of an endpoint, used by its control thread only.

A ROUTER hears everybody, a DEALER speaks to each peer. With keys all of them are CURVE: the ROUTER asks us about every
public key by ZeroMQ's ZAP, which this very thread answers from the allow-list, and each message comes with the key of
its connection, which no sender can choose.
"""

from __future__ import annotations

import itertools

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.session.keys import Access
from kvferry.session.messages import MAX_MESSAGE_BYTES, Peer

_ZAP = "inproc://zeromq.zap.01"  # fixed by the protocol, one per context
_HANDSHAKE_MS = 5_000
_REFUSED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not allow this side's public key {key}; copy the key's file to its "
    "allowed/ and restart it",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "its control socket and this side's don't agree: one has keys and the other "
    "has none, or other ones; set KVFERRY_KEYS on both",
}
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Lines:
    def __init__(self, access: Access, poller: zmq.Poller) -> None:
        self._keys, self._poller = access.keys, poller
        self._context = zmq.Context(io_threads=1)
        self._dealers: dict[Peer, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], Peer] = {}  # of lines whose handshake has not ended
        self._numbers = itertools.count()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)  # first: a ROUTER that finds nobody to ask would refuse
        self.router = self._socket(zmq.ROUTER)
        if self._keys:
            self.router.setsockopt(zmq.CURVE_SERVER, 1)
            self.router.setsockopt(zmq.ZAP_DOMAIN, b"kvferry")
            self.router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self.router.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.secret)
        self.address = f"tcp://{access.host}:{self.router.bind_to_random_port(f'tcp://{access.host}')}"
        for listening in (self.router, self._zap):
            poller.register(listening, zmq.POLLIN)

    def open(self, peer: Peer, address: str, key: str) -> None:
        """`key`: the peer's public key; only its holder can answer. Empty without keys."""
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, 10_000)
        if self._keys:
            dealer.setsockopt_string(zmq.CURVE_SERVERKEY, key)
            dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, self._keys.public)
            dealer.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.secret)
        where = f"inproc://handshake-{next(self._numbers)}"
        dealer.monitor(where, _WATCHED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(where)
        self._monitors[monitor] = peer
        self._poller.register(monitor, zmq.POLLIN)
        dealer.connect(address)
        self._dealers[peer] = dealer

    def send(self, peer: Peer, data: bytes) -> None:
        """zmq.Again where the line is full."""
        self._dealers[peer].send(data, zmq.NOBLOCK)

    def receive(self) -> tuple[list[bytes], str]:
        """The frames of a message, without the one that ZeroMQ adds, and the public key of its connection, empty
        without keys. zmq.Again where there is none.
        """
        _, *frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
        key = str(frames[0].get("User-Id")) if self._keys and frames else ""
        return [frame.bytes for frame in frames], key

    def handshakes(self) -> list[tuple[Peer, str]]:
        """Answer whether keys are allowed; which peers have refused our line since, and why."""
        while _readable(self._zap):
            self._zap.send_multipart(self._judge(self._zap.recv_multipart()))
        refused = []
        for monitor, peer in list(self._monitors.items()):
            if _readable(monitor):
                problem = _REFUSED.get(int(recv_monitor_message(monitor)["event"]))
                self._unwatch(monitor, peer)
                if problem:
                    refused.append((peer, problem.format(key=self._keys.public if self._keys else "")))
        return refused

    def close(self, peer: Peer) -> None:
        for monitor in [monitor for monitor, watched in self._monitors.items() if watched == peer]:
            self._unwatch(monitor, peer)
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            dealer.close(linger=0)

    def close_all(self, linger_ms: int) -> None:
        """What has been said is still delivered within `linger_ms`, in the background: `end` waits for it."""
        self.router.close()
        for monitor, peer in list(self._monitors.items()):
            self._unwatch(monitor, peer)
        for dealer in self._dealers.values():
            dealer.close(linger=linger_ms)
        self._zap.close(linger=0)

    def end(self) -> None:
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        made.setsockopt(zmq.LINGER, 0)
        return made

    def _unwatch(self, monitor: zmq.Socket[bytes], peer: Peer) -> None:
        del self._monitors[monitor]
        self._dealers[peer].disable_monitor()
        self._poller.unregister(monitor)
        monitor.close(linger=0)

    def _judge(self, request: list[bytes]) -> list[bytes]:
        """RFC 27: version, request, domain, address, identity, mechanism, credentials → version, request, status …"""
        version, number, *_, mechanism, credentials = request
        key = z85.encode(credentials).decode() if mechanism == b"CURVE" else ""
        if self._keys and key in self._keys.allowed:
            return [version, number, b"200", b"", key.encode(), b""]
        return [version, number, b"400", b"key not allowed", b"", b""]


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
