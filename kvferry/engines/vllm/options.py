"""What `kv_connector_extra_config` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import DocumentError, RegistryError
from kvferry.layout.document import Struct
from kvferry.session.registry import Registry

FIELD = "kv_connector_extra_config"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Options(Struct, frozen=True):
    """The connector's own settings; each has a default that suits one machine."""

    registry: str = ""
    """URL of a registry that several instances share; without one, each instance runs its own."""
    transport: str = "auto"
    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8
    slot_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 32)] = 8 << 20
    lease_s: Seconds = 480.0
    """How long prefill keeps the blocks of a finished request for a decode instance that hasn't taken them yet."""
    timeout_s: Seconds = 60.0
    """How long decode waits for one request's cache."""
    unknown_s: Seconds = 10.0
    """How long prefill lets decode wait for an id that it doesn't know: it knows an id before it answers the router,
    but its workers hear of it with their next step only.
    """
    landing: Literal["slots", "pages"] = "slots"
    """Decode: "pages" lets prefill, which has to be trusted then, write straight into the blocks."""
    offer_first: bool = False
    """Prefill: decode may ask before prefill has computed the prompt, and then waits as long as it is told to there."""


def read_options(extra: Mapping[str, Any]) -> Options:
    """Check `kv_connector_extra_config`; DocumentError names the field at fault and what is expected there."""
    try:
        options = msgspec.convert(dict(extra), Options)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        problem = problem[:1].lower() + problem[1:].replace("`", "")
        raise DocumentError(f"{FIELD}.{name}" if name else FIELD, problem) from None
    if options.registry:
        try:
            Registry(options.registry)
        except (RegistryError, ValueError) as error:
            raise DocumentError(f"{FIELD}.registry", str(error)) from None
    return options
