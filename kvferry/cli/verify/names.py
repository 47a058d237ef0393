"""What the stand-ins are registered as: never as the engine's own instance, which may be running."""

from __future__ import annotations

PREFIX = "verify/"


def endpoint_name(name: str) -> str:
    return f"{PREFIX}{name}"


def control_name(name: str) -> str:
    """Where their drivers' questions go."""
    return f"{PREFIX}{name}/control"


def is_stand_in(instance: str) -> bool:
    return instance.startswith(PREFIX)
