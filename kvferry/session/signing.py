"""How a registry and its clients prove to each other that they hold the deployment's secret. HMAC-SHA256 throughout.

A client asks for a challenge and signs one request with it; the registry takes each challenge once and signs its answer
to that very request. So nothing recorded can be said again, and no two machines' clocks are compared.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
import time
from collections.abc import Callable

SCHEME = "kvferry-1"
ANSWER_HEADER = "X-KVFerry-Signature"
CHALLENGE_PATH = "/v1/challenge"
CHALLENGE_S = 30.0
_DRAWN = struct.Struct(">Q16s")  # when it ends on the registry's own clock, in ms; random


class Unsigned(Exception):
    """The request does not show that its sender holds the secret; the text goes to the sender."""


class Signer:
    """The client's side of one request."""

    def __init__(self, secret: bytes, challenge: str) -> None:
        self._secret, self._challenge, self._nonce = secret, challenge, secrets.token_hex(16)
        self._mac = ""

    def header(self, method: str, path: str, body: bytes) -> str:
        """For `Authorization`."""
        self._mac = _request_mac(self._secret, method, path, self._challenge, self._nonce, body)
        return f"{SCHEME} {self._challenge}:{self._nonce}:{self._mac}"

    def answers(self, signature: str, status: int, body: bytes) -> bool:
        """Whether this is the registry's answer to the request of `header`."""
        return _same(signature, answer_mac(self._secret, self._mac, status, body))


class Challenges:
    """The registry's side. Strangers cost no memory: what a challenge is worth can be told from itself."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret, self._clock = secret, clock
        self._key = secrets.token_bytes(32)  # of this start: no challenge outlives it
        self._used: dict[str, float] = {}  # until when, oldest first
        self._lock = threading.Lock()

    def draw(self) -> str:
        drawn = _DRAWN.pack(int((self._clock() + CHALLENGE_S) * 1000), secrets.token_bytes(16))
        return drawn.hex() + _mac(self._key, drawn)

    def check(self, header: str, method: str, path: str, body: bytes) -> str:
        """The request's signature. Unsigned where it isn't valid, or was used before."""
        scheme, _, rest = header.partition(" ")
        parts = rest.split(":")
        if scheme != SCHEME or len(parts) != 3:
            raise Unsigned("this registry has keys and the request none; set KVFERRY_KEYS to the deployment's folder")
        challenge, nonce, mac = parts
        if not _same(mac, _request_mac(self._secret, method, path, challenge, nonce, body)):
            raise Unsigned("the request is signed with other keys than this registry's; use one deployment's folders")
        self._use(challenge)
        return mac

    def _use(self, challenge: str) -> None:
        now = self._clock()
        drawn = _unhex(challenge[: 2 * _DRAWN.size])
        if len(drawn) != _DRAWN.size or not _same(challenge[2 * _DRAWN.size :], _mac(self._key, drawn)):
            raise Unsigned("the challenge is not of this registry's current start")
        end_s = _DRAWN.unpack(drawn)[0] / 1000
        with self._lock:
            for old in [old for old, until_s in self._used.items() if until_s < now]:
                del self._used[old]
            if end_s < now or challenge in self._used:
                raise Unsigned("the challenge has been used before or is too old")
            self._used[challenge] = end_s


def answer_mac(secret: bytes, request_mac: str, status: int, body: bytes) -> str:
    return _mac(secret, "\n".join(("answer", request_mac, str(status), _digest(body))).encode())


def _request_mac(secret: bytes, method: str, path: str, challenge: str, nonce: str, body: bytes) -> str:
    parts = ("request", method, path, challenge, nonce, _digest(body))
    return _mac(secret, "\n".join(parts).encode("utf-8", "replace"))


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _mac(key: bytes, data: bytes) -> str:
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
