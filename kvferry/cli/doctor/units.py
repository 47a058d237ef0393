"""Sizes and times as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Three digits and a unit of 1,024s."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1000 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"


def speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
