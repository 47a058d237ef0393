"""The life of a request through the backend's managers, senders and receivers: refusals, aborts, rooms, junk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
pytest.importorskip("sglang", reason="sglang is not importable")

import torch  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

from kvferry.engines.dump import merge_dumps, read_dump  # noqa: E402
from kvferry.engines.sglang import bootstrap as bootstrap_module  # noqa: E402
from kvferry.engines.sglang import pool as pool_module  # noqa: E402
from kvferry.engines.sglang.memory import SplitMemory  # noqa: E402
from kvferry.engines.sglang.receiver import KVFerryReceiver  # noqa: E402
from kvferry.engines.sglang.sender import KVFerrySender  # noqa: E402
from kvferry.errors import EngineError  # noqa: E402
from kvferry.layout.document import Mode  # noqa: E402
from kvferry.session import RegistryServer  # noqa: E402
from tests.engines.sglang.rig import (  # noqa: E402
    LAYERS,
    UNTOUCHED,
    Rank,
    Request,
    Rig,
    open_rig,
    open_server,
    start_side,
    wait_for,
    write_config,
)
from tests.engines.sglang.shapes import LLAMA  # noqa: E402

PAGES = [3, 7, 1]


@pytest.fixture
def rig(model: Path, free_port: int) -> Iterator[Rig]:
    with open_rig(model, 1, 1, 16, free_port) as rig:
        yield rig


def receiver(rig: Rig, room: int, metadata: bool = True) -> KVFerryReceiver:
    rank = rig.decode[0]
    made = rig.run(rank, KVFerryReceiver, rank.manager, rig.address, room)
    assert rig.run(rank, rank.manager.try_ensure_parallel_info, rig.address)
    rig.run(rank, made.init, 0)
    if metadata:
        rig.run(rank, made.send_metadata, np.array(PAGES, np.int32), 5, [], decode_prefix_len=0)
    return made


def sender(rig: Rig, room: int) -> KVFerrySender:
    rank = rig.prefill[0]
    return rig.run(rank, KVFerrySender, rank.manager, rig.address, room)


def send(rig: Rig, made: KVFerrySender, pages: list[int]) -> None:
    rig.run(rig.prefill[0], made.init, len(pages), 2)
    rig.run(rig.prefill[0], made.send, np.array(pages, np.int32), [], 16 * len(pages))


def reason(side: Any) -> str:
    with pytest.raises(KVTransferError) as caught:
        side.failure_exception()
    return str(caught.value)


def ends(side: Any, state: int) -> None:
    wait_for(lambda: side.poll() in (KVPoll.Success, KVPoll.Failed))
    assert side.poll() == state


def clean(rig: Rig) -> bool:
    """Nothing of any request is left in either manager."""
    managers = [rank.manager for rank in [*rig.prefill, *rig.decode]]
    return not any(m._running or m.request_status or m.failure_records or m.rooms._heard for m in managers)


def test_states_of_a_good_request(rig: Rig) -> None:
    source = sender(rig, 1)
    assert source.poll() == KVPoll.Bootstrapping
    target = receiver(rig, 1, metadata=False)
    assert target.poll() == KVPoll.WaitingForInput
    assert source.poll() == KVPoll.Bootstrapping  # decode has no pages yet
    rig.run(rig.decode[0], target.send_metadata, np.array(PAGES, np.int32), 5, [])
    assert target.poll() == KVPoll.Transferring
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    send(rig, source, PAGES)
    ends(source, KVPoll.Success)
    ends(target, KVPoll.Success)
    source.clear()
    target.clear()
    assert clean(rig)


def test_a_room_may_come_again(rig: Rig) -> None:
    ids = set()
    for _ in range(3):
        target, source = receiver(rig, 9), sender(rig, 9)
        wait_for(lambda source=source: source.poll() == KVPoll.WaitingForInput)
        send(rig, source, PAGES)
        ends(source, KVPoll.Success)
        ends(target, KVPoll.Success)
        ids.add(target._transfer_id)
        source.clear()
        target.clear()
    assert len(ids) == 3


def test_a_room_in_use_is_refused_to_the_second(rig: Rig) -> None:
    target, source = receiver(rig, 4), sender(rig, 4)
    again, second = receiver(rig, 4), sender(rig, 4)
    assert again.poll() == second.poll() == KVPoll.Failed
    assert "another request uses this bootstrap room" in reason(again)
    assert "another request uses this bootstrap room" in reason(second)
    second.abort()
    again.clear()
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    send(rig, source, PAGES)
    ends(source, KVPoll.Success)
    ends(target, KVPoll.Success)


@pytest.mark.parametrize("begun", [False, True])
def test_decode_aborts(rig: Rig, begun: bool) -> None:
    source, target = sender(rig, 2), receiver(rig, 2, metadata=begun)
    if begun:
        wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    target.abort()
    assert target.poll() == KVPoll.Failed
    assert "Aborted" in reason(target)
    assert target._transfer is None or target._transfer.state != "running"  # its pages are free
    ends(source, KVPoll.Failed)
    assert "aborted on decode's side" in reason(source)
    assert clean(rig)


def test_prefill_aborts_while_moving(rig: Rig) -> None:
    target, source = receiver(rig, 2), sender(rig, 2)
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    source.kv_mgr.endpoint._memory.gather = lambda *_: time.sleep(0.5)
    send(rig, source, PAGES)
    source.abort()
    assert source.poll() == KVPoll.Failed
    assert "Aborted" in reason(source)
    assert source._transfer.state == "failed"
    ends(target, KVPoll.Failed)
    assert "aborted on prefill's side" in reason(target)
    assert clean(rig)


@pytest.mark.parametrize("chunks", [0, 1])
def test_prefill_aborts_between_chunks(rig: Rig, chunks: int) -> None:
    """Decode hears of it at once, not by its deadline (F54)."""
    target, source = receiver(rig, 2), sender(rig, 2)
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    rig.run(rig.prefill[0], source.init, len(PAGES), 2)
    for page in PAGES[:chunks]:
        rig.run(rig.prefill[0], source.send, np.array([page], np.int32), None, 16)
    source.abort()
    assert source._transfer.state == "failed"  # the scheduler gives the pages away now
    assert "Aborted" in reason(source)
    ends(target, KVPoll.Failed)
    assert "aborted on prefill's side" in reason(target)
    assert clean(rig)


def test_a_chunk_moves_while_the_next_is_computed(rig: Rig) -> None:
    (target_rank,), (source_rank,) = rig.decode, rig.prefill
    target_rank.manager.piece_tokens = 16
    source_rank.fill(PAGES, range(48), 2)
    target, source = receiver(rig, 2), sender(rig, 2)
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    rig.run(source_rank, source.init, len(PAGES), 2)
    first = slice(PAGES[0] * 16, PAGES[0] * 16 + 16)

    def arrived() -> bool:
        return all(
            bool((target_rank.cells(layer, part)[first] == source_rank.cells(layer, part)[first]).all())
            for layer in range(LAYERS)
            for part in range(2)
        )

    assert not arrived()
    rig.run(source_rank, source.send, np.array(PAGES[:1], np.int32), None, 16)
    wait_for(arrived)
    assert source.poll() == target.poll() == KVPoll.Transferring
    rig.run(source_rank, source.send, np.array(PAGES[1:], np.int32), [], 32)
    ends(source, KVPoll.Success)
    ends(target, KVPoll.Success)


def test_a_chunk_is_not_read_before_its_event(rig: Rig) -> None:
    """F50."""
    (rank,) = rig.prefill
    order: list[str] = []
    gather = rank.manager.endpoint._memory.gather
    rank.manager.endpoint._memory.gather = lambda *args: (order.append("read"), gather(*args))[1]
    target, source = receiver(rig, 2), sender(rig, 2)
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    rig.run(rank, source.init, len(PAGES), 2)
    source._early_send_wait_event = SimpleNamespace(synchronize=lambda: order.append("computed"))
    rig.run(rank, source.send, np.array(PAGES, np.int32), [], 48)
    ends(target, KVPoll.Success)
    ends(source, KVPoll.Success)
    assert order[0] == "computed" and "read" in order


def test_pages_that_do_not_exist_fail_the_request(rig: Rig) -> None:
    target, source = receiver(rig, 3), sender(rig, 3)
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    send(rig, source, [3, 7, 100_000])
    ends(source, KVPoll.Failed)
    ends(target, KVPoll.Failed)
    assert "100000" in reason(source)
    assert "100000" in reason(target)


def test_prompts_of_different_length_fail_the_request(rig: Rig) -> None:
    target, source = receiver(rig, 3), sender(rig, 3)
    wait_for(lambda: source.poll() == KVPoll.WaitingForInput)
    send(rig, source, PAGES[:2])
    ends(target, KVPoll.Failed)
    text = reason(target)
    assert "48" in text and "32" in text
    ends(source, KVPoll.Failed)


def test_another_model_is_refused_with_both_names(model: Path, free_port: int, tmp_path: Path) -> None:
    other = tmp_path / "other-llama"
    other.symlink_to(model)
    with open_rig(model, 1, 1, 16, free_port, decode_model=other) as rig:
        target = receiver(rig, 1)
        ends(target, KVPoll.Failed)
        text = reason(target)
        assert "model" in text and "tiny-llama" in text and "other-llama" in text


@pytest.mark.parametrize(
    ("change", "field", "both"),
    [
        ({"layers": 3}, "groups.attn.layers", ("(0, 1, 2, 3)", "(0, 1, 2)")),
        ({"heads": 2}, "groups.attn.axes", ("'head': 4", "'head': 2")),
        ({"dim": 16}, "groups.attn.axes", ("'dim': 32", "'dim': 16")),
        ({"dtype": torch.float16}, "groups.attn.dtype", ("'float32'", "'float16'")),
    ],
)
def test_another_cache_is_refused_with_both_values(
    model: Path, free_port: int, tmp_path: Path, change: dict[str, Any], field: str, both: tuple[str, str]
) -> None:
    """F18, F37: on that request; SGLang's own handshake compares page size and data type only."""
    shape = replace(LLAMA, **change)
    changes = {"num_hidden_layers": shape.layers, "num_key_value_heads": shape.heads}
    other = write_config(model, tmp_path / "tiny-llama", **changes)
    with open_rig(model, 1, 1, 16, free_port, decode_model=other, decode_shape=shape) as rig:
        target = receiver(rig, 1)
        ends(target, KVPoll.Failed)
        text = reason(target)
        assert field in text and all(value in text for value in both), text


def test_another_version_of_sglang_may_say_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides cache the same: what else one of them says is no reason to refuse it."""
    honest = bootstrap_module._get

    def more(address: str, path: str) -> bytes:
        answer = json.loads(honest(address, path))
        return json.dumps({**answer, "said_since": "0.6"} if path.startswith("/route") else answer).encode()

    monkeypatch.setattr(bootstrap_module, "_get", more)
    test_states_of_a_good_request(rig)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
def test_a_pool_on_a_device(model: Path, free_port: int, sizes: tuple[int, int]) -> None:
    """Its tensors are reached through torch, the rows beside it as host memory. The device is pretended."""
    with open_rig(model, *sizes, 16, free_port, shape=replace(LLAMA, device=True)) as rig:
        regions = rig.prefill[0].manager.instance.workers[0].regions
        assert {region.memory for region in regions} == {"host", "device"}
        assert all(isinstance(rank.manager.endpoint._memory, SplitMemory) for rank in rig.prefill + rig.decode)
        for rank in rig.prefill:
            rank.fill(PAGES, range(48), 2)
        for rank in rig.decode:
            rank.arena.bytes[:] = UNTOUCHED
        states, _, _ = rig.run_request(Request(1, 41, PAGES, [9, 4, 6]))
        assert states == {KVPoll.Success}
        for rank in rig.decode:
            found = rank.arena.bytes.copy()
            rank.fill([9, 4, 6], range(48), 5)
            assert (found == rank.arena.bytes).all()


def test_pages_on_the_host(model: Path, free_port: int) -> None:
    """Decode receives into SGLang's pool on the host instead of the one on the device, which is left as it was."""
    with open_rig(model, 2, 1, 16, free_port, shape=replace(LLAMA, device=True, host=True)) as rig:
        (rank,) = rig.decode
        for each in rig.prefill:
            each.fill(PAGES, range(48), 2)
        for room, target_pages in enumerate(([9, 4, 6], [2, 3, 5])):
            rank.arena.bytes[:] = UNTOUCHED
            request = Request(room, 48, PAGES, target_pages)
            (target,) = rig.receive(request, rig.decode, destination=KVTransferDestination.HOST)
            assert target.supports_host_destination
            for source in rig.send(request):
                ends(source, KVPoll.Success)
            ends(target, KVPoll.Success)
            assert target.is_abort_release_safe()
            found = rank.arena.bytes.copy()
            rank.arena.bytes[:] = UNTOUCHED
            for cells in rank.shape.twin_cells(rank):
                cells.write(target_pages, range(48))
            for index, view in enumerate(rank.row_bytes(5)):
                view[:] = np.random.default_rng(index).integers(0, 256, len(view), np.uint8)
            assert (found == rank.arena.bytes).all()
        request = Request(7, 48, PAGES, [2, 3, 5])
        (target,) = rig.receive(request, rig.decode, destination=KVTransferDestination.HOST)
        target.abort()
        assert "Aborted" in reason(target)
        assert target.is_abort_release_safe()  # before anybody else gets these pages


def test_data_parallel_attention(model: Path, free_port: int) -> None:
    """Each data-parallel rank of prefill is an instance of its own; decode takes a request from the one that has it."""
    with open_server(free_port):
        rig = Rig(f"127.0.0.1:{free_port}", [], [])
        try:
            start_side(rig.prefill, model, DisaggregationMode.PREFILL, 1, 16, free_port, dp=2)
            start_side(rig.decode, model, DisaggregationMode.DECODE, 2, 16, free_port)
            everybody = rig.prefill
            assert len({rank.manager.home.instance for rank in everybody}) == 2
            for dp_rank in (0, 1):
                for rank in everybody:
                    rank.fill(PAGES, range(48), 2)
                rig.prefill = [everybody[dp_rank]]
                room = 10 + dp_rank  # SGLang's rule: the room says which
                receivers = rig.receive(Request(room, 48, PAGES, PAGES), rig.decode, dp_rank)
                senders = rig.send(Request(room, 48, PAGES, PAGES))
                for side in (*receivers, *senders):
                    ends(side, KVPoll.Success)
                for rank in rig.decode:
                    found = rank.arena.bytes.copy()
                    rank.arena.bytes[:] = UNTOUCHED
                    rank.fill(PAGES, range(48), 5)
                    touched = rank.arena.bytes != UNTOUCHED
                    assert (found == rank.arena.bytes)[touched].all()
            rig.prefill = everybody
        finally:
            rig.close()


def test_no_prefill_server(rig: Rig) -> None:
    rank = rig.decode[0]
    made = rig.run(rank, KVFerryReceiver, rank.manager, "127.0.0.1:9", 1)
    assert not rank.manager.try_ensure_parallel_info("127.0.0.1:9")
    rig.run(rank, made.init, 0)
    assert made.poll() == KVPoll.Failed
    assert "127.0.0.1:9" in reason(made)


@pytest.mark.parametrize("junk", [[b"junk"], [b""], [b"\x80"], [b"a", b"b"], [b"x" * 10_000], [b"\x81\xa4room\x01"]])
def test_junk_on_the_room_socket(rig: Rig, junk: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        push.connect(f"tcp://127.0.0.1:{rig.prefill[0].manager.rank_port}")
        push.send_multipart(junk)
        test_states_of_a_good_request(rig)


def test_a_restarted_prefill_is_another_one(rig: Rig, model: Path, free_port: int) -> None:
    """The bootstrap server answers all the time, as if the restart fell between two heartbeats (F64)."""
    test_states_of_a_good_request(rig)
    old = rig.prefill.pop()
    old.manager.teardown()
    start_side(rig.prefill, model, DisaggregationMode.PREFILL, 1, 16, free_port)
    rig.decode[0].manager._on_heartbeat_success(rig.address)
    test_states_of_a_good_request(rig)


def test_a_dump_says_what_was_registered(
    model: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVFERRY_DUMP", str(tmp_path))
    with open_rig(model, 1, 2, 16, free_port) as rig:
        dumps = [read_dump(path) for path in sorted(tmp_path.glob("sglang-*decode*.json"))]
        assert [dump.rank for dump in dumps] == [0, 1]
        whole = merge_dumps(dumps)
        assert [worker.pools[0].owned["head"] for worker in whole.workers] == [((0, 2),), ((2, 4),)]
        names = {tensor.name: tensor.address.value for tensor in dumps[0].tensors}
        assert names["layers.1.v"] == rig.decode[0].pool.v_buffer[1].data_ptr()


def test_a_registry_of_the_cluster(model: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with RegistryServer() as registry:
        monkeypatch.setenv("KVFERRY_REGISTRY", registry.url)
        with open_rig(model, 1, 1, 16, free_port) as rig:
            test_states_of_a_good_request(rig)
            assert {rank.manager.home.registry for rank in [*rig.prefill, *rig.decode]} == {registry.url}


Damage = Callable[[Any], Any]


def head_by_head(described: Any) -> Any:
    """Says that the pool is [head][token] inside a page."""
    (pool,) = described.pools
    token, head, dim = pool.modes
    width = dim.extent * dim.stride_bytes
    modes = (Mode("token", token.extent, width), Mode("head", head.extent, width * token.extent), dim)
    return replace(described, pools=(type(pool)(pool.group, pool.page_tokens, pool.page_bytes, modes, pool.buffers,
                                                table=pool.table, owned=pool.owned),))  # fmt: skip


def values_before_keys(described: Any) -> Any:
    """Says that the first half of the buffers are the values."""
    (pool,) = described.pools
    other = {"k": "v", "v": "k"}
    buffers = tuple(type(b)(b.layer, other[b.part], b.region, b.offset_bytes, b.pages) for b in pool.buffers)
    return replace(described, pools=(type(pool)(pool.group, pool.page_tokens, pool.page_bytes, pool.modes, buffers,
                                                table=pool.table, owned=pool.owned),))  # fmt: skip


def layers_reversed(described: Any) -> Any:
    (pool,) = described.pools
    last = max(b.layer for b in pool.buffers)
    buffers = tuple(type(b)(last - b.layer, b.part, b.region, b.offset_bytes, b.pages) for b in pool.buffers)
    return replace(described, pools=(type(pool)(pool.group, pool.page_tokens, pool.page_bytes, pool.modes, buffers,
                                                table=pool.table, owned=pool.owned),))  # fmt: skip


@pytest.mark.parametrize("damage", [head_by_head, values_before_keys, layers_reversed])
def test_a_wrong_layout_does_not_start(
    model: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    honest = pool_module.describe_cache
    monkeypatch.setattr(pool_module, "describe_cache", lambda *args: [damage(part) for part in honest(*args)])
    ranks: list[Rank] = []
    with pytest.raises(EngineError, match=r"(?s)layout probe: group attn, layer \d, part [kv].*layout:.*memory:"):
        start_side(ranks, model, DisaggregationMode.DECODE, 1, 16, free_port)
