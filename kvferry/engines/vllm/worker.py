"""The worker side: orders of the scheduler become transfers of this worker's endpoint, their ends become reports."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.engines.vllm.layers import is_state, window_of
from kvferry.engines.vllm.layout import Groups, base_kind, table_name
from kvferry.engines.vllm.options import FIELD, Options
from kvferry.engines.vllm.orders import Blocks, LoadOrder, Orders, SendOrder
from kvferry.engines.vllm.scheduler import BlockTable
from kvferry.errors import DocumentError, KVFerryError
from kvferry.layout.document import Instance
from kvferry.layout.request import Side, Table, Wanted
from kvferry.session.endpoint import Endpoint
from kvferry.session.transfer import Transfer
from kvferry.transport.memory import HostMemory

LOG = logging.getLogger("vllm.kvferry")


@dataclass
class Ended:
    """What ended since the last report; each request once. A failed load is among `received` too."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


@dataclass
class Moved:
    """What was moved since the last report, in numbers; the fields are those of `stats.COUNTS`."""

    received_bytes: int = 0
    sent_bytes: int = 0
    copies: int = 0
    failed_loads: int = 0
    unclaimed_prompts: int = 0
    seconds: list[float] = field(default_factory=list)


def open_endpoint(
    document: Instance, rank: int, memory: HostMemory, world: int, registry: str, options: Options
) -> Endpoint:
    """This worker's endpoint. DocumentError names the option that it can't be opened with."""
    try:
        return Endpoint(
            document,
            rank,
            memory,
            world=world,
            registry=registry,
            transport=options.transport,
            slots=options.slots,
            slot_bytes=options.slot_bytes,
            landing=options.landing,
            early_s=options.lease_s if options.offer_first else options.unknown_s,
        )
    except DocumentError as error:
        if error.path in Options.__struct_fields__:
            raise DocumentError(f"{FIELD}.{error.path}", error.problem) from None
        raise


class WorkerSide:
    """`groups` are the instance's, `tables` vLLM's KV cache groups. Called from one thread, vLLM's worker loop."""

    def __init__(self, endpoint: Endpoint, groups: Groups, tables: Sequence[BlockTable], options: Options) -> None:
        self._endpoint, self._tables = endpoint, tuple(tables)
        self._kinds = {group.name: base_kind(kind) for kind, group in groups.items()}
        self._lease_s, self._timeout_s = options.lease_s, options.timeout_s
        self._sends: dict[Transfer, SendOrder] = {}
        self._loads: dict[Transfer, LoadOrder] = {}
        self._given_up: set[Transfer] = set()
        self._held: list[Transfer] = []  # ended, and a peer may still write into their blocks
        self._ended = Ended()
        self._moved = Moved()

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._sends or self._loads)

    def submit(self, orders: Orders) -> None:
        """Start what is ordered. An order that can't be started ends at once, and no other is affected."""
        for send in orders.sends:
            try:
                self._sends[self._send(send)] = send
            except KVFerryError as error:
                LOG.error("kvferry: request %s can't be sent: %s", send.request, error)
                self._ended.sent.add(send.request)
        for load in orders.loads:
            if load.problem:
                self._fail(load, load.problem)
                continue
            try:
                self._loads[self._receive(load)] = load
            except KVFerryError as error:
                self._fail(load, str(error))

    def collect(self, finished: Iterable[str], timeout_s: float = 0.0) -> Ended:
        """What ended since the last call; a load whose request is among `finished` (its client left) is aborted.
        Where nothing did and transfers are under way, wait so long for one to end.

        Its blocks are written until the endpoint says that the transfer has ended, and only then it is reported.
        """
        gone = set(finished)
        for transfer, load in self._loads.items():
            if load.request in gone and load.start < load.stop and transfer not in self._given_up:
                self._given_up.add(transfer)
                self._endpoint.abort(transfer, "the client of the request left")
        over = [*self._held, *self._endpoint.poll(timeout_s if self.busy else 0.0)]
        self._held = [transfer for transfer in over if not transfer.pages_free]
        for transfer in over:
            if not transfer.pages_free:
                continue
            if transfer in self._sends:
                self._sent(transfer, self._sends.pop(transfer))
            elif transfer in self._loads:
                self._received(transfer, self._loads.pop(transfer))
        ended, self._ended = self._ended, Ended()
        return ended

    def moved(self) -> Moved:
        """Numbers since the last call."""
        moved, self._moved = self._moved, Moved()
        return moved

    def close(self) -> None:
        self._endpoint.close()

    def _send(self, order: SendOrder) -> Transfer:
        groups = {name: self._sent_part(kind, order) for name, kind in self._kinds.items()}
        side = self._side(order.blocks, order.tokens)
        return self._endpoint.send(order.transfer, groups, side, timeout_s=self._lease_s, request=order.request)

    def _sent_part(self, kind: str, order: SendOrder) -> Wanted:
        if is_state(kind):
            return Wanted(position=order.tokens)
        # from the first token on that every layer of this kind still has
        first = max(t.first_token(held) for t, held in zip(self._tables, order.blocks) if t.kind == kind)
        return Wanted((first, order.tokens))

    def _receive(self, order: LoadOrder) -> Transfer:
        fetches = order.start < order.stop
        groups = {
            name: _wanted_part(kind, order) for name, kind in self._kinds.items() if fetches or not is_state(kind)
        }
        return self._endpoint.receive(
            order.transfer,
            order.source,
            groups,
            self._side(order.blocks, order.stop),
            timeout_s=self._timeout_s,
            registry=order.registry,
            request=order.request,
        )

    def _side(self, blocks: Blocks, tokens: int) -> Side:
        tables = {}
        for number, (table, held) in enumerate(zip(self._tables, blocks)):
            # a state is one row of its table
            ids = held[table.state_block(tokens) :][:1] if is_state(table.kind) else held
            tables[table_name(number)] = Table(tuple(block or None for block in ids))
        return Side(tables)

    def _sent(self, transfer: Transfer, order: SendOrder) -> None:
        if transfer.error is not None:
            LOG.warning("kvferry: request %s was not taken: %s", order.request, transfer.error)
            self._moved.unclaimed_prompts += 1
        elif transfer.report is not None:
            LOG.info("kvferry: sent %s: %d bytes", order.transfer, transfer.report.bytes)
            self._moved.sent_bytes += transfer.report.bytes
            self._moved.copies += transfer.report.copies
        self._ended.sent.add(order.request)

    def _received(self, transfer: Transfer, order: LoadOrder) -> None:
        given_up = transfer in self._given_up
        self._given_up.discard(transfer)
        if order.start == order.stop:
            if transfer.error is not None:
                LOG.info("kvferry: request %s: prefill was not told: %s", order.request, transfer.error)
        elif transfer.error is not None and not given_up:
            self._fail(order, str(transfer.error))
        else:
            if transfer.report is not None:
                report = transfer.report
                ms = report.seconds * 1000
                LOG.info("kvferry: received %s: %d bytes in %.1f ms", order.transfer, report.bytes, ms)
                self._moved.received_bytes += report.bytes
                self._moved.copies += report.copies
                self._moved.seconds.append(report.seconds)
            self._ended.received.add(order.request)

    def _fail(self, order: LoadOrder, problem: str) -> None:
        LOG.error("kvferry: request %s: its cache did not arrive: %s", order.request, problem)
        if order.start == order.stop:
            return
        self._moved.failed_loads += 1
        self._ended.received.add(order.request)
        if len(self._tables) > 1:
            self._ended.failed.add(order.request)  # block ids are unique within one table only
        else:
            first = order.start // self._tables[0].block_tokens
            self._ended.failed_blocks.update(order.blocks[0][first:])


def _wanted_part(kind: str, order: LoadOrder) -> Wanted:
    if is_state(kind):
        return Wanted(position=order.stop)
    window = window_of(kind)
    # the next token to be computed is number `stop`, and it is part of its own window
    start = order.start if window is None else max(order.start, order.stop - window + 1)
    return Wanted((min(start, order.stop), order.stop))
