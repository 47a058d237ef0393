"""Settings of the backend, from environment variables: SGLang passes them on to each of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import EngineError
from kvferry.session.registry import Registry
from kvferry.transport.select import WAYS

_LIMIT = 1 << 40


@dataclass(frozen=True)
class Options:
    """`registry`: the URL of a registry to use, empty: this instance runs its own. `dump`: a folder, or None."""

    transport: str = "auto"
    slots: int = 8
    slot_bytes: int = 8 << 20
    registry: str = ""
    dump: Path | None = None

    @staticmethod
    def read(environment: Mapping[str, str]) -> Options:
        """EngineError names the variable, its value and what is expected."""
        default = Options()
        transport = environment.get("KVFERRY_TRANSPORT", default.transport)
        if transport not in WAYS:
            raise EngineError(f"KVFERRY_TRANSPORT: expected one of {', '.join(WAYS)}, got {transport!r}")
        registry = environment.get("KVFERRY_REGISTRY", default.registry)
        if registry:
            Registry(registry)  # RegistryError where it is no URL
        dump = environment.get("KVFERRY_DUMP", "")
        return Options(
            transport,
            _count(environment, "KVFERRY_SLOTS", default.slots),
            _count(environment, "KVFERRY_SLOT_BYTES", default.slot_bytes),
            registry,
            Path(dump) if dump else None,
        )


def _count(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= _LIMIT:
        raise EngineError(f"{name}: expected an integer in 1 … 2**40, got {text!r}")
    return int(text)
