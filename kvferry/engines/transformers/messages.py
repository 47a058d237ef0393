"""What an instance and its worker processes say to each other over a pipe: MessagePack structs, one tag each."""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from kvferry.errors import EngineError


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


class Start(Message, frozen=True):
    """All that a worker needs; given to the process at its start."""

    instance: str
    model: str
    rank: int
    tp: int
    dtype: str
    layout: Literal["nhd", "hnd"]
    page_tokens: int
    pages: int
    registry: str
    transport: str
    store_port: int
    parent: int
    timeout_s: float


class Prefill(Message, frozen=True):
    """Run the model over a prompt and keep its pages ready for whoever fetches `request`. Answer: FirstToken."""

    request: str
    tokens: tuple[int, ...]


class Release(Message, frozen=True):
    """Wait until `request` has been fetched and free its pages. Answer: Moved."""

    request: str


class Decode(Message, frozen=True):
    """Fetch the cache of `request` from instance `source` and go on behind `first`.

    Answer: Token messages from rank 0, then Answer.
    """

    request: str
    source: str
    prompt_tokens: int
    first: int
    max_tokens: int


class Ready(Message, frozen=True):
    """The model is loaded and the endpoint registered."""


class FirstToken(Message, frozen=True):
    token: int


class Token(Message, frozen=True):
    """One more token was decoded: progress only."""


class Moved(Message, frozen=True):
    """One worker's side of a finished transfer; `copies` are contiguous runs gathered or scattered.

    `transports` are those by which a prefill worker has written to its peers.
    """

    bytes: int
    copies: int
    chunks: int
    seconds: float
    transports: tuple[str, ...] = ()


class Answer(Message, frozen=True):
    """`tokens` start with the first one, which prefill produced."""

    tokens: tuple[int, ...]
    moved: Moved


class Failed(Message, frozen=True):
    """The command failed; the worker goes on unless it ends on its own."""

    problem: str


Command = Union[Prefill, Release, Decode]
Reply = Union[Ready, FirstToken, Token, Moved, Answer, Failed]


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """Read one message of (union) type `kind`; EngineError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EngineError(f"a worker and its instance don't understand each other: {error}") from None
