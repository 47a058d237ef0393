"""SGLang's bootstrap server, which also says where a prefill instance's workers are to be found.

The kvferry instance of a prefill server is named anew at each start. Its ranks tell the bootstrap server, with their
usual registration, which name that is and which registry they are in; decode asks by `GET /kvferry?dp_rank=N`.
"""

from __future__ import annotations

import http.client
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, PrefillServerInfo

from kvferry.engines.sglang import NAME
from kvferry.errors import DocumentError, EngineError
from kvferry.layout.document import Struct, decode_json, encode_json

MAX_ANSWER_BYTES = 64 << 10
TIMEOUT_S = 5.0


class Home(Struct, frozen=True):
    """Where an instance is: its name, and the URL of the registry that its workers are in."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    registry: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class KVFerryBootstrapServer(CommonKVBootstrapServer):
    """Runs beside the prefill server's HTTP front end."""

    def __init__(self, host: str, port: int) -> None:
        self._homes: dict[int, Home] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get("/kvferry", self._handle_home)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            data = await request.json()
            home = decode_json(encode_json(data.pop(NAME)), Home)
            rank = int(data["attn_dp_rank"] if data["system_dp_size"] == 1 else data["system_dp_rank"])
        except (DocumentError, ValueError, KeyError, TypeError, AttributeError) as error:
            return web.Response(text=f"no registration of a kvferry prefill rank: {error!r}", status=400)
        response: web.Response = await super()._handle_route_put(request)
        if response.status == 200:
            self._homes[rank] = home
        return response

    async def _handle_home(self, request: web.Request) -> web.Response:
        text = request.query.get("dp_rank", "")
        home = self._homes.get(int(text)) if text.isdecimal() else None
        if home is None:
            return web.Response(text=f"no prefill instance of dp_rank {text!r} has registered", status=404)
        return web.Response(body=encode_json(home), content_type="application/json")


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
        info = PrefillServerInfo(**fields)
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
