"""SGLang's bootstrap server, which also says where a prefill instance's workers are to be found.

The kvferry instance of a prefill server is named anew at each start. Its ranks tell the bootstrap server, with their
usual registration, which name that is and which registry they are in; decode asks by `GET /kvferry?dp_rank=N`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import logging
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, PrefillServerInfo

from kvferry.engines.sglang import NAME
from kvferry.errors import DocumentError, EngineError, KVFerryError
from kvferry.layout.document import Struct, decode_json, encode_json
from kvferry.session.keys import access
from kvferry.session.registry import Registry

LOG = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 << 10
TIMEOUT_S = 5.0
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class Home(Struct, frozen=True):
    """Where an instance is: its name, and the URL of the registry that its workers are in."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    registry: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Rank(msgspec.Struct, frozen=True):
    """Of a registration, what says which rank it is of, and of how many; other fields are SGLang's."""

    kvferry: Home
    attn_tp_size: Size
    attn_tp_rank: Size
    attn_cp_size: Size
    attn_cp_rank: Size
    attn_dp_size: Size
    attn_dp_rank: Size
    pp_size: Size
    pp_rank: Size
    system_dp_size: Size
    system_dp_rank: Size
    rank_ip: Annotated[str, msgspec.Meta(max_length=256)]
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    page_size: Size

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.attn_tp_size, self.attn_cp_size, self.attn_dp_size, self.pp_size, self.system_dp_size)

    @property
    def place(self) -> tuple[int, ...]:
        return (self.dp_rank, self.attn_cp_rank, self.attn_tp_rank, self.pp_rank)

    @property
    def dp_rank(self) -> int:
        return self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank


class KVFerryBootstrapServer(CommonKVBootstrapServer):
    """Runs beside the prefill server's HTTP front end.

    A rank is registered once: the same again changes nothing, and another one takes its place only when the first one's
    instance is no longer in its registry.
    """

    def __init__(self, host: str, port: int) -> None:
        self._ranks: dict[tuple[int, ...], _Rank] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get("/kvferry", self._handle_home)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            rank = decode_json(await request.read(), _Rank)
        except DocumentError as error:
            return web.Response(text=f"no registration of a kvferry prefill rank: {error}", status=400)
        problem = self._problem(rank)
        if problem:
            return web.Response(text=problem, status=400)
        known = self._ranks.get(rank.place) or next(
            (r for r in self._ranks.values() if r.dp_rank == rank.dp_rank), None
        )
        if known == rank:
            return web.Response(text="OK", status=200)
        if known is not None and (known.place == rank.place or known.kvferry != rank.kvferry):
            if await asyncio.get_running_loop().run_in_executor(None, is_there, known.kvferry):
                LOG.warning("registration of %s refused: %s is there", rank.kvferry.instance, known.kvferry.instance)
                text = f"rank {rank.place} (dp, cp, tp, pp) of {known.kvferry.instance!r} is registered and alive"
                return web.Response(text=text, status=409)
        response: web.Response = await super()._handle_route_put(request)
        if response.status == 200:
            if rank.place in self._ranks:
                self._registered_count -= 1  # SGLang counts registrations, and is ready when there are enough
            self._ranks[rank.place] = rank
        return response

    def _problem(self, rank: _Rank) -> str:
        first = next(iter(self._ranks.values()), rank)
        if rank.sizes != first.sizes:
            return f"sizes (tp, cp, attention dp, pp, dp) {rank.sizes}, the other ranks have {first.sizes}"
        ranks = (rank.attn_tp_rank, rank.attn_cp_rank, rank.attn_dp_rank, rank.pp_rank, rank.system_dp_rank)
        if any(at >= max(1, size) for at, size in zip(ranks, rank.sizes)):
            return f"rank {ranks} (tp, cp, attention dp, pp, dp) is not inside sizes {rank.sizes}"
        return ""

    async def _handle_home(self, request: web.Request) -> web.Response:
        text = request.query.get("dp_rank", "")
        home = next((rank.kvferry for rank in self._ranks.values() if str(rank.dp_rank) == text), None)
        if home is None:
            return web.Response(text=f"no prefill instance of dp_rank {text[:20]!r} has registered", status=404)
        return web.Response(body=encode_json(home), content_type="application/json")


def is_there(home: Home) -> bool:
    """Whether any worker of an instance is in its registry."""
    try:
        return bool(Registry(home.registry, keys=access(None, None).keys).instance(home.instance).workers)
    except KVFerryError:
        return False


def fetch_home(address: str, dp_rank: int) -> Home:
    """Ask the bootstrap server at `address` (host:port). EngineError where there is none or it is no kvferry's."""
    try:
        return decode_json(_get(address, f"/kvferry?dp_rank={dp_rank}"), Home)
    except DocumentError as error:
        raise EngineError(f"bootstrap server {address}: unreadable answer: {error}") from None


def fetch_topology(address: str) -> PrefillServerInfo:
    """Parallel sizes of the prefill server. EngineError as in `fetch_home`, and while not all its ranks are there."""
    query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    try:
        fields = decode_json(_get(address, f"/route?{query}"), dict[str, Any])
        # another version of SGLang may say more
        known = {field.name for field in dataclasses.fields(PrefillServerInfo)}
        info = PrefillServerInfo(**{name: value for name, value in fields.items() if name in known})
    except (DocumentError, TypeError, ValueError) as error:
        raise EngineError(f"bootstrap server {address}: unreadable answer: {error}") from None
    if min(info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size) < 1:
        raise EngineError(f"bootstrap server {address}: sizes below 1: {info}")
    return info


def _get(address: str, path: str) -> bytes:
    try:
        parts = urlsplit(f"http://{address}")
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            data = response.read(MAX_ANSWER_BYTES)
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"bootstrap server {address!r}: {error or type(error).__name__}") from None
    if response.status != 200:
        text = data[:200].decode(errors="replace")
        raise EngineError(
            f"bootstrap server {address}: {response.status}: {text}; is it a prefill server with "
            f"--disaggregation-transfer-backend {NAME}?"
        )
    return data
