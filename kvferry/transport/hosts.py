"""Addresses of machines as people and peers write them."""

from __future__ import annotations

import ipaddress


def machine_address(host: str) -> str:
    """The IPv4 address of one machine, or nothing where `host` is none: a name, a wildcard, a multicast group."""
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return ""
    return "" if address.is_unspecified or address.is_multicast else str(address)


def is_loopback(host: str) -> bool:
    """Whether only processes of its own machine reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
