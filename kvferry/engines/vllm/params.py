"""`kv_transfer_params`: what prefill's answer tells decode, through the router. The names are those of vLLM's own
NixlConnector, so that routers and proxies made for it work unchanged.

A router copies what it got from prefill into the decode request. It comes from outside, so it is checked here, and
nothing in it is taken for an address or a block number: `remote_block_ids` is written for routers and never read.

Offer-first: a router that asks both sides at once gives both the same name for the request, as `transfer_id` to prefill
and as `remote_request_id` to decode, which then doesn't know how many tokens prefill will have: all of the prompt's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvferry.errors import DocumentError

MAX_ID = 256
"""Characters that a transfer id may have."""


class _Handle(msgspec.Struct, frozen=True):
    """The fields that decode reads; routers may add their own."""

    remote_engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    remote_request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=65_536)]
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.-]+$")]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Named(msgspec.Struct, frozen=True):
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=65_536)] = ""


@dataclass(frozen=True)
class Handle:
    """Where a prompt's cache is or will be: transfer id, instance, the registry that knows it, and how many tokens if
    prefill has said so.
    """

    transfer: str
    source: str
    registry: str
    tokens: int | None


def transfer_id(engine: str, request: str) -> str:
    """The id by which both sides name the cache of `request`, vLLM's internal request id on the prefill engine."""
    name = f"{engine}/{request}"
    if len(name) <= MAX_ID:
        return name
    # a client chooses most of a request id: keep what people read, and a digest for the rest
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{name[: MAX_ID - 1 - len(digest)]}#{digest}"


def read_name(params: Mapping[str, Any], request: str) -> str:
    """What prefill calls the cache of `request`: the name that the router gave it, else vLLM's own. DocumentError."""
    return _convert(params, _Named, "a name of 1 … 65536 characters is expected").transfer_id or request


def read_handle(params: Mapping[str, Any]) -> Handle:
    """DocumentError names the field that is missing or wrong."""
    fields = _convert(params, _Handle, "pass on what prefill answered, unchanged")
    return Handle(
        transfer_id(fields.remote_engine_id, fields.remote_request_id),
        fields.remote_engine_id,
        f"http://{fields.remote_host}:{fields.remote_port}",
        fields.remote_num_tokens,
    )


T = TypeVar("T")


def _convert(params: Mapping[str, Any], kind: type[T], advice: str) -> T:
    try:
        return msgspec.convert(dict(params), kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        path = f"kv_transfer_params.{place.rstrip('`')}" if place else "kv_transfer_params"
        raise DocumentError(path, f"{problem.replace('`', '')}; {advice}") from None


def make_params(
    *, engine: str, request: str, registry: str, tokens: int, blocks: Sequence[Sequence[int]], tp: int, pp: int
) -> dict[str, Any]:
    """What prefill answers when `tokens` tokens of `request` lie ready in `blocks`, per KV cache group."""
    url = urlsplit(registry)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_host": url.hostname,
        "remote_port": url.port,
        "remote_num_tokens": tokens,
        "tp_size": tp,
        "pp_size": pp,
    }
