"""Who may and can talk to whom: addresses as workers advertise them, and keys. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvferry.transport.hosts import is_loopback, machine_address

_ADDRESS = re.compile(r"tcp://([0-9.]{7,15}):([0-9]{1,5})\Z")


def host_of(address: str) -> str:
    """The IPv4 address in `tcp://HOST:PORT`; empty where it is none that a single machine can have."""
    found = _ADDRESS.match(address)
    return machine_address(found[1]) if found and 0 < int(found[2]) < 65536 else ""


def line_problem(own_address: str, allowed: Collection[str], address: str, key: str) -> str:
    """Why we open no line to a peer, or nothing. `allowed`: keys that may talk to us, empty where we have none.

    `key`: the peer's public key as its registry entry or its card says, empty where it has none.
    """
    if allowed and not key:
        return "the peer has no keys and this side has; set KVFERRY_KEYS on both"
    if key and not allowed:
        return f"the peer has keys (its public key is {key}) and this side has none; set KVFERRY_KEYS on both"
    if allowed and key not in allowed:
        return f"the peer's public key {key} is not allowed here; copy its file to this side's allowed/ and restart"
    own, host = host_of(own_address), host_of(address)
    if not host:
        return f"address {address!r} is not that of one machine, expected tcp://IPV4:PORT"
    if is_loopback(own) != is_loopback(host):
        near, far = ("this side's", "the peer's") if is_loopback(own) else ("the peer's", "this side's")
        return (
            f"{near} address is on loopback, {far} is not (the peer's is {address}, this side's {own_address}); set "
            "KVFERRY_HOST, and with it KVFERRY_KEYS, on both"
        )
    return ""


def registration_problem(registry_host: str, allowed: Collection[str], address: str, key: str) -> str:
    """Why a registry on `registry_host` doesn't take such an entry, or nothing. `allowed` as above, of the registry."""
    if allowed and key not in allowed:
        return f"its public key {key!r} is not allowed here; copy its file to the registry's allowed/ and restart it"
    if key and not allowed:
        return f"it has keys (its public key is {key}) and this registry has none; set KVFERRY_KEYS on both"
    host = host_of(address)
    if not host:
        return f"its address {address!r} is not that of one machine, expected tcp://IPV4:PORT"
    if is_loopback(host) and not is_loopback(registry_host):
        return f"its address {address!r} is on loopback and this registry at {registry_host!r} is not; set KVFERRY_HOST"
    return ""
