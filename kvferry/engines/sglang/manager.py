"""One scheduler process: its pool described and tried, its endpoint, and the state of its rooms.

Works on top of SGLang's `CommonKVManager`, whose attributes schedulers read. SGLang's states of a room come from the
endpoint's transfers; nothing here waits, except at the end of a transfer that failed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import (
    get_disagg,
    get_parallel,
    get_schedule,
    linear_attn_parallel_group,
    linear_attn_tp_size,
    process_model_config,
)

from kvferry.engines.dump import write_dump
from kvferry.engines.sglang import NAME
from kvferry.engines.sglang.bootstrap import Home, fetch_home, fetch_topology
from kvferry.engines.sglang.control import Ask, Attempts, Cancel, Rooms, decode
from kvferry.engines.sglang.layout import ROW_TABLE, describe_rows, document, on_host
from kvferry.engines.sglang.memory import memory_of
from kvferry.engines.sglang.options import Options
from kvferry.engines.sglang.places import Pages, held, tables, wanted
from kvferry.engines.sglang.pool import (
    Model,
    Ranks,
    listed_twins,
    named_tensors,
    read_pool,
    registered,
    state_kinds,
)
from kvferry.engines.sglang.probe import map_memory, probe_pool
from kvferry.errors import DocumentError, EngineError, TransferError
from kvferry.layout.document import Instance
from kvferry.layout.request import Side
from kvferry.session import Endpoint, RegistryServer, Transfer
from kvferry.session.events import Fence
from kvferry.transport.base import Memory
from kvferry.transport.memory import HostMemory

LOG = logging.getLogger(__name__)
END_S = 10.0
"""How long the scheduler waits for a failed transfer to let go of its pages; it takes milliseconds."""
LISTEN_MS = 500
STAGE_MS = 20
"""SGLang asks the first stage of a pipeline how requests stand; the others have to tell it without being asked."""


class KVFerryManager(CommonKVManager):
    """`map_memory` says where a registered address really is, and `map_all` does so for all that a worker has, so that
    tests can emulate devices.
    """

    map_memory = staticmethod(map_memory)
    map_all = staticmethod(memory_of)
    reports_transfer_latency = True
    supports_host_destination = True

    def __init__(
        self, args: Any, disaggregation_mode: DisaggregationMode, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        parallel = get_parallel()
        _check_supported(parallel, args.kvferry_pool, server_args, disaggregation_mode)
        self.options = Options.read(os.environ)
        self.home, self._registry_server = _open_home(self.options, disaggregation_mode.value, _dp_rank(parallel, args))
        self.instance, self._table_of = self._describe(args, server_args, parallel)
        self.state_names = state_kinds(args)
        worker = self.instance.workers[0]
        memory = self.map_all(worker, list(named_tensors(args.kvferry_pool).values()), self.map_memory)
        self._dump(args)
        probe_pool(args.kvferry_pool, worker, self.instance.groups, memory)
        world = parallel.attn_tp_size * parallel.pp_size
        self.endpoint = self._open_endpoint(self.instance, memory, world)
        self.host_endpoint = self._open_host_endpoint(args, world)
        self.rooms, self.attempts = Rooms(), Attempts()
        self._running: dict[str, int] = {}
        self._homes: dict[tuple[str, int], Home] = {}
        # pieces as prefill computes them, so that each can move while the next is computed
        self.piece_tokens = max(0, get_schedule().chunked_prefill_size or 0)
        self.transfer_timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        # the first thing that the outside hears of us is the registration that this ends with
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._closing = threading.Event()
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self._thread = threading.Thread(target=self._listen, name="kvferry-rooms", daemon=True)
            self._thread.start()
        else:
            self._thread = self._start_heartbeat_checker_thread()

    def _open_endpoint(self, instance: Instance, memory: Memory, world: int) -> Endpoint:
        options = self.options
        return Endpoint(
            instance,
            instance.workers[0].rank,
            memory,
            world=world,
            registry=self.home.registry,
            transport=options.transport,
            slots=options.slots,
            slot_bytes=options.slot_bytes,
        )

    def _open_host_endpoint(self, args: Any, world: int) -> Endpoint | None:
        """Decode may receive into SGLang's pool on the host: the same cache, as an instance of its own."""
        here, twins = listed_twins(args)
        if not twins:
            return None
        instance = on_host(self.instance, f"{self.home.instance}.host", here, twins)
        regions = [self.map_memory(region.base, region.bytes) for region in instance.workers[0].regions]
        return self._open_endpoint(instance, HostMemory(regions), world)

    def _describe(self, args: Any, server_args: Any, parallel: Any) -> tuple[Instance, Mapping[str, str]]:
        """This worker's part of the instance, and which page table each group goes by."""
        config = process_model_config()
        name = (server_args.served_model_name or server_args.model_path).rstrip("/").rpartition("/")[2]
        model = Model(config.num_hidden_layers, config.get_total_num_kv_heads(), parallel.pp_size > 1)
        place = Ranks(
            parallel.attn_tp_rank,
            parallel.attn_tp_size,
            getattr(parallel, f"{linear_attn_parallel_group()}_rank"),
            linear_attn_tp_size(),
        )
        last_stage = parallel.pp_rank == parallel.pp_size - 1
        rows = describe_rows(registered(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens), last_stage)
        cache = read_pool(args.kvferry_pool, args, model, place)
        table_of = {pool.group: pool.table_name for part in cache for pool in part.pools}
        rank = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
        instance = document(self.home.instance, name, rank, [*cache, rows])
        return instance, {**table_of, **{group.name: ROW_TABLE for group in rows.groups}}

    def _dump(self, args: Any) -> None:
        if self.options.dump is None:
            return
        rank = self.instance.workers[0].rank
        tensors = named_tensors(args.kvferry_pool)
        write_dump(self.options.dump, "sglang", version("sglang"), self.instance, rank, tensors)

    # rooms and transfers

    def begin_send(self, room: int, transfer: str) -> Transfer:
        """Prefill: nothing is computed yet. From now on either side's end of the request ends the other's."""
        name = str(room)  # what both sides and the router know it by
        limit_s = self.transfer_timeout_s
        started = self.endpoint.send(transfer, {}, Side(), timeout_s=limit_s, last=False, request=name)
        self._running[started.id] = room
        return started

    def send_more(self, room: int, transfer: Transfer, pages: Pages, fence: Fence | None) -> None:
        """Prefill: these pages hold the prompt from its first token on, and with a row, all that goes with it."""
        known = (self.instance.groups, self._table_of, pages)
        self.endpoint.extend(transfer, held(*known), tables(*known), last=pages.row is not None, fence=fence)
        self.update_status(room, KVPoll.Transferring)

    def receive_pages(
        self,
        room: int,
        transfer: str,
        source: Home,
        pages: Pages,
        source_page: int,
        window: int | None,
        endpoint: Endpoint,
    ) -> Transfer:
        """Decode: fetch what belongs into these pages from a source whose pages take `source_page` tokens."""
        known = (self.instance.groups, self._table_of, pages)
        started = endpoint.receive(
            transfer,
            source.instance,
            wanted(*known, source_page, window),
            tables(*known),
            timeout_s=self.transfer_timeout_s,
            registry=source.registry,
            piece_tokens=self.piece_tokens,
            request=str(room),
        )
        self._running[started.id] = room
        self.update_status(room, KVPoll.Transferring)
        return started

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Called by SGLang's senders and receivers whenever the scheduler polls them."""
        self._settle()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.follow(bootstrap_room)
        return super().check_status(bootstrap_room)

    def check_status_pp_consensus(self, bootstrap_room: int) -> KVPoll:
        """As `check_status`, on the first stage of a pipeline, which asks for all of them."""
        self._settle()
        self.follow(bootstrap_room)
        return super().check_status_pp_consensus(bootstrap_room)

    @property
    def _endpoints(self) -> list[Endpoint]:
        return [self.endpoint] if self.host_endpoint is None else [self.endpoint, self.host_endpoint]

    def _settle(self) -> None:
        for transfer in [each for endpoint in self._endpoints for each in endpoint.poll()]:
            room = self._running.pop(transfer.id, None)
            if room is None or room not in self.request_status:
                continue
            if transfer.error is not None:
                self.fail_room(room, str(transfer.error))
            else:
                self.update_status(room, KVPoll.Success)

    def follow(self, room: int) -> None:
        """What decode said about a room whose transfer has not begun here."""
        word, status = self.rooms.last(room), self.request_status.get(room)
        if isinstance(word, Ask) and status == KVPoll.Bootstrapping:
            self.update_status(room, KVPoll.WaitingForInput)
        elif isinstance(word, Cancel) and status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
            self.fail_room(room, f"decode gave up: {word.reason}")

    def fail_room(self, room: int, reason: str) -> None:
        """The first reason is the one that counts."""
        with self.failure_lock:
            self.failure_records.setdefault(room, reason)
        self.update_status(room, KVPoll.Failed)

    def finish(self, transfer: Transfer | None, reason: str, endpoint: Endpoint | None = None) -> None:
        """End a transfer if it still runs; afterwards nothing of it touches its pages, or its room. `endpoint`: whose
        it is, where that is not the one of the pool itself.
        """
        if transfer is None:
            return
        self._running.pop(transfer.id, None)
        if transfer.state != "running":
            return
        endpoint = endpoint or self.endpoint
        endpoint.abort(transfer, reason)
        try:
            endpoint.wait(transfer, END_S)
        except TransferError as error:
            if transfer.state == "running":
                LOG.error("%s; its pages may still be read or written", error)

    def teardown(self) -> None:
        """Give everything back. A scheduler that is killed leaves nothing behind either: peers see its end."""
        self._closing.set()
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
        self._thread.join()
        self.server_socket.close(linger=0)
        for endpoint in self._endpoints:
            endpoint.close()
        if self._registry_server is not None:
            self._registry_server.close()

    # prefill: decode's words

    def _listen(self) -> None:
        later_stage = self.pp_rank > 0
        while not self._closing.is_set():
            try:
                if self.server_socket.poll(STAGE_MS if later_stage else LISTEN_MS):
                    word = decode(self.server_socket.recv_multipart())
                    self.rooms.hear(word)
                    if later_stage:
                        self.follow(word.room)
                if later_stage:
                    self._settle()
            except DocumentError as error:
                LOG.warning("message on the room socket refused: %s", str(error)[:400])
            except Exception:
                LOG.exception("internal error while reading the room socket")
                time.sleep(0.1)

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        home = {"instance": self.home.instance, "registry": self.home.registry}
        super()._register_topology_row(url, {**payload, NAME: home})

    # decode: its prefill servers

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """One attempt to learn a prefill server's topology. What doesn't fit is found by the handshake, for the request
        that asked, and stops nothing else.
        """
        if bootstrap_addr in self.prefill_info_table:
            return True
        try:
            info = fetch_topology(bootstrap_addr)
        except EngineError as error:
            LOG.error("%s", error)
            return False
        self._resolve_rank_mapping(info)
        self.prefill_info_table[bootstrap_addr] = info
        return True

    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """Which prefill ranks this rank tells about its requests: each hears it from one decode rank at least. Where
        the cache comes from is no matter of this: the endpoint routes it.
        """
        mine = list(range(self.attn_tp_rank, info.attn_tp_size, self.attn_tp_size))
        info.target_tp_ranks = mine or [self.attn_tp_rank % info.attn_tp_size]
        info.target_tp_rank = info.target_tp_ranks[0]
        info.target_cp_ranks = list(range(info.attn_cp_size))
        info.target_pp_ranks = list(range(info.pp_size))
        info.required_dst_info_num = info.required_prefill_response_num = 1

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """SGLang's checksum is over what a rank holds: it says something only where both sides cut alike."""
        info = self.prefill_info_table.get(bootstrap_addr)
        return info is not None and info.attn_tp_size == self.attn_tp_size

    def find_home(self, bootstrap_addr: str, dp_rank: int) -> Home:
        """EngineError where the prefill server is not there or runs another backend."""
        key = (bootstrap_addr, dp_rank)
        if key not in self._homes:
            self._homes[key] = fetch_home(bootstrap_addr, dp_rank)
        return self._homes[key]

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """A server that was restarted between two heartbeats is alive, but it is not the one that we knew."""
        for (address, dp_rank), known in list(self._homes.items()):
            if address != bootstrap_addr:
                continue
            try:
                lost = fetch_home(address, dp_rank) != known
            except EngineError:
                lost = True
            if lost:
                return self._handle_node_failure(bootstrap_addr)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        for key in [key for key in self._homes if key[0] == failed_bootstrap_addr]:
            self._homes.pop(key, None)
        super()._handle_node_failure(failed_bootstrap_addr)


def _dp_rank(parallel: Any, args: Any) -> int:
    """As the bootstrap server counts them: data-parallel attention, or data-parallel servers."""
    return int(parallel.attn_dp_rank if parallel.dp_size == 1 else args.system_dp_rank or 0)


def _check_supported(parallel: Any, pool: Any, server_args: Any, mode: DisaggregationMode) -> None:
    for what, size in (
        ("context parallelism (attn_cp_size)", parallel.attn_cp_size),
        ("--dcp-size", parallel.attn_dcp_size),
        ("--nnodes", parallel.nnodes),
    ):
        if size > 1:
            raise EngineError(f"{what} is {size}; the kvferry backend for SGLang supports 1 so far")
    if parallel.pp_size > 1 and mode == DisaggregationMode.DECODE:
        raise EngineError(f"--pp-size is {parallel.pp_size}; the kvferry backend supports it for prefill only")
    if parallel.enable_kv_cache_sharding or getattr(pool, "layer_shard_enabled", False):
        raise EngineError("pages or layers of the KV cache are spread over ranks, which is not supported yet")
    if server_args.enable_pd_role_switch:
        raise EngineError("--enable-pd-role-switch is not supported by the kvferry backend")
    policy = get_disagg().disaggregation_decode_allocation_policy
    if policy != "early":
        raise EngineError(f"--disaggregation-decode-allocation-policy is {policy!r}; the kvferry backend needs 'early'")


def _open_home(options: Options, role: str, dp_rank: int) -> tuple[Home, RegistryServer | None]:
    """A name for this start of this instance, the same on all its ranks. Its first rank runs the registry."""
    group = get_parallel().world_group
    server, home = None, None
    if group.rank_in_group == 0:
        server = None if options.registry else RegistryServer()
        home = Home(f"sglang-{role}-{secrets.token_hex(8)}", options.registry or getattr(server, "url", ""))
    shared: Home = group.broadcast_object(home, src=0)
    return Home(f"{shared.instance}.dp{dp_rank}", shared.registry), server
