"""What an endpoint needs of a registry: enough for another one, such as etcd, to take the place of the embedded one.

An implementation keeps an entry per (instance, rank) until its time to live is over, lets a larger generation replace a
smaller one and never the other way round, calls an instance ready when every rank 0 … world-1 is there, and may lose
everything at any time: each worker puts its entry again and again. Methods are called from several threads, and raise
RegistryError, within a few seconds, where they can't do what they should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.session.keys import Keys
from kvferry.session.registry import Entry, Listed, Registry, View


class Meeting(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def host(self) -> str:
        """Where it is, to see whether its users can reach us."""
        ...

    def at(self, url: str) -> Meeting:
        """Another one, asked in the same way."""
        ...

    def put(self, entry: Entry, ttl_s: float) -> None:
        """Register, or renew, for `ttl_s`."""
        ...

    def delete(self, entry: Entry) -> None:
        """Sign this start off; a later start's entry stays."""
        ...

    def instance(self, name: str) -> View:
        """Its living workers, and what is missing."""
        ...

    def listing(self) -> tuple[Listed, ...]:
        """Everything that is registered, by instance and rank: for people, no transfer needs it."""
        ...


KINDS: dict[str, Callable[[str, Keys | None], Meeting]] = {"http": lambda url, keys: Registry(url, keys=keys)}
"""By the scheme of the URL."""


def meeting(url: str, keys: Keys | None) -> Meeting:
    """RegistryError where no registry can have this URL."""
    return KINDS.get(url.partition("://")[0], KINDS["http"])(url, keys)
