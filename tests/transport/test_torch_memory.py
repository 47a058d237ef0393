"""Gather and scatter on tensors: the same bytes as `HostMemory`, which has its own oracle, and the same refusals."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import AddressError, DocumentError, TransportError
from kvferry.layout.address import U64, Address, Addresses
from kvferry.layout.presets import uniform_instance
from kvferry.layout.request import Side, Table, Wanted
from kvferry.session.endpoint import Endpoint
from kvferry.session.registry import RegistryServer
from kvferry.transport.base import NixlCard
from kvferry.transport.memory import HostMemory, map_array, window
from tests.transport.installed import NIXL_PROBLEM

torch = pytest.importorskip("torch", reason="torch is not installed: tensors can't be tried")
from kvferry.transport.torch_memory import (  # noqa: E402  (needs torch)
    DeviceStaging,
    StreamOrder,
    TorchMemory,
    map_tensor,
    tensor_window,
)

BASES = (0xFFFF81AB54E01000, (1 << 63) - 2000, (1 << 64) - 4096, 16)
GUARD = 64
CHECK = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@dataclass(frozen=True)
class Runs:
    addresses: Addresses
    dense_offsets: U64
    lengths: U64

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum())


def runs(places: list[tuple[int, int, int]]) -> Runs:
    columns = np.array(places, np.uint64).reshape(-1, 3).T.copy()
    return Runs(Addresses(columns[0]), columns[1], columns[2])


@dataclass(frozen=True)
class Case:
    """Regions of `sizes` bytes at `bases`, `lead` bytes after the guard before each, and runs between them and a chunk
    of `chunk_bytes`.
    """

    bases: tuple[int, ...]
    sizes: tuple[int, ...]
    leads: tuple[int, ...]
    places: list[tuple[int, int, int]]
    chunk_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Runs of one or several lengths, on a grid of 1 … 16 bytes, dense or with gaps, in any order on both sides."""
    count = draw(st.integers(1, 3))
    bases = tuple(sorted(draw(st.permutations(BASES))[:count]))
    grid = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 24]), max_size=16))
    if draw(st.booleans()):
        lengths = [draw(st.sampled_from([1, 4, 7, 8, 48]))] * len(lengths)
    gap = st.integers(0, draw(st.sampled_from([0, 0, 3])))
    used = [draw(st.integers(0, 3)) * grid for _ in bases]
    places, dense = [], draw(gap) * grid
    for length in lengths:
        side = draw(st.integers(0, count - 1))
        at = used[side] + draw(gap) * grid
        places.append((bases[side] + at, dense, length))
        used[side] = -(-(at + length) // grid) * grid
        dense += length + draw(gap)
    sizes = tuple(end + draw(st.integers(1, 9)) for end in used)
    leads = tuple(draw(st.sampled_from([0, 0, 1, 4])) for _ in bases)
    return Case(bases, sizes, leads, draw(st.permutations(places)), dense + draw(st.integers(0, 8)))


@settings(deadline=None, max_examples=300)
@given(cases(), st.integers(0, 2**32))
def test_tensors_and_host_memory_give_the_same_bytes(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in case.sizes]
    blocks = [rng.integers(0, 256, size + 2 * GUARD + 8, dtype=np.uint8) for size in case.sizes]
    tensors, insides = [], []
    for array, block, lead in zip(arrays, blocks, case.leads):
        inside = slice(GUARD + lead, GUARD + lead + len(array))
        block[inside] = array
        insides.append(inside)
        tensors.append(torch.from_numpy(block)[inside])
    host = HostMemory([window(Address(base), array) for base, array in zip(case.bases, arrays)])
    memory = TorchMemory([tensor_window(Address(base), tensor) for base, tensor in zip(case.bases, tensors)])
    before = [block.copy() for block in blocks]

    chunk = rng.integers(0, 256, case.chunk_bytes, dtype=np.uint8)
    found = torch.from_numpy(chunk.copy())
    host.gather(runs(case.places), chunk)
    memory.gather(runs(case.places), found)
    assert (found.numpy() == chunk).all()
    assert all((block == was).all() for block, was in zip(blocks, before)), "gather wrote to the pages"

    fresh = rng.integers(0, 256, case.chunk_bytes, dtype=np.uint8)
    host.scatter(runs(case.places), fresh)
    memory.scatter(runs(case.places), torch.from_numpy(fresh.copy()))
    for block, was, array, inside in zip(blocks, before, arrays, insides):
        was[inside] = array
        assert (block == was).all(), "the pages, or the bytes around them, differ"


@settings(deadline=None, max_examples=60)
@given(cases(), st.booleans())
def test_a_chunk_on_the_host_passes_by_the_device(case: Case, as_numpy: bool) -> None:
    """Where the chunk is elsewhere it is copied over, and bytes between the runs stay as they are. Here both are the
    same device, so the memory is told that it is another one.
    """
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in case.sizes]
    copies = [torch.from_numpy(array.copy()) for array in arrays]
    host = HostMemory([window(Address(base), array) for base, array in zip(case.bases, arrays)])
    memory = TorchMemory([tensor_window(Address(base), tensor) for base, tensor in zip(case.bases, copies)])
    memory.device = torch.device("cpu", 0)  # not equal to that of a chunk, and the same memory
    chunk = rng.integers(0, 256, case.chunk_bytes, dtype=np.uint8)
    found = chunk.copy()
    host.gather(runs(case.places), chunk)
    memory.gather(runs(case.places), found if as_numpy else torch.from_numpy(found))
    assert (found == chunk).all()
    fresh = rng.integers(0, 256, case.chunk_bytes, dtype=np.uint8)
    fresh.flags.writeable = not as_numpy
    host.scatter(runs(case.places), fresh)
    memory.scatter(runs(case.places), fresh if as_numpy else torch.from_numpy(fresh))
    assert all((tensor.numpy() == array).all() for tensor, array in zip(copies, arrays))


@pytest.mark.parametrize(
    "bad",
    [
        (BASES[0] - 1, 0, 4),
        (BASES[0] + 60, 0, 5),
        (BASES[0], 61, 4),
        (BASES[0], 0, 1 << 63),
        (BASES[0], (1 << 64) - 2, 4),
        (0, 0, 4),
        (BASES[0] + (1 << 32), 0, 1),
    ],
)
def test_runs_outside_are_refused_before_anything_moves(bad: tuple[int, int, int]) -> None:
    tensor, chunk = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    memory = TorchMemory([tensor_window(Address(BASES[0]), tensor)])
    for action in (memory.gather, memory.scatter):
        with pytest.raises(AddressError, match="is outside"):
            action(runs([(BASES[0], 0, 8), bad]), chunk)
    assert not tensor.any() and chunk.all()


def test_what_is_no_chunk_is_refused() -> None:
    memory = TorchMemory([tensor_window(Address(16), torch.zeros(64, dtype=torch.uint8))])
    place = runs([(16, 0, 8)])
    for chunk in (
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.uint8)[::2],
        torch.zeros(64, dtype=torch.uint8, device="meta"),
        np.zeros(8, np.int8),
        np.zeros(64, np.uint8)[::2],
    ):
        with pytest.raises(AddressError, match=r"contiguous bytes|must be on cpu"):
            memory.gather(place, chunk)
        with pytest.raises(AddressError, match=r"contiguous bytes|must be on cpu"):
            memory.scatter(place, chunk)
    fixed = np.zeros(8, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(AddressError, match="read-only"):
        memory.gather(place, fixed)
    with pytest.raises(AddressError, match="1 addresses, 1 offsets, 2 lengths"):
        memory.gather(Runs(place.addresses, place.dense_offsets, np.ones(2, np.uint64)), torch.zeros(8).byte())
    with pytest.raises(AddressError, match="no memory is mapped"):
        TorchMemory([]).gather(place, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(AddressError, match="one device"):
        TorchMemory([map_tensor(torch.zeros(8)), map_tensor(torch.zeros(8, device="meta"))])


def test_a_tensor_is_mapped_from_its_first_to_its_last_item() -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(2, 12)
    region = map_tensor(tensor[:, 1::2])
    assert (region.nbytes, region.base.value) == (46, tensor.data_ptr() + 2)
    assert map_tensor(tensor[:0]).nbytes == 0
    region.view.fill_(0xFF)
    assert tensor[0, 0] == 0 and torch.isnan(tensor.flatten()[1:]).all()
    with pytest.raises(AddressError, match=r"pass 2\*\*64"):
        tensor_window(Address((1 << 64) - 8), tensor)


def test_regions_may_overlap_only_as_views_of_one_storage() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    with pytest.raises(AddressError, match="overlap but are different memory"):
        TorchMemory([tensor_window(Address(0), tensor), tensor_window(Address(63), tensor)])
    with pytest.raises(AddressError, match="overlap but are different memory"):
        TorchMemory([tensor_window(Address(0), tensor), tensor_window(Address(32), tensor.clone())])
    both = tensor.view(8, 2, 4)  # K and V side by side: each view spans the other one's bytes
    memory = TorchMemory([map_tensor(both[:, 1]), map_tensor(both[:, 0]), map_tensor(tensor[8:12])])
    chunk = torch.zeros(64, dtype=torch.uint8)
    memory.gather(runs([(tensor.data_ptr(), 0, 64)]), chunk)
    assert (chunk == tensor).all()


def test_view_is_the_memory_itself() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    memory = TorchMemory([tensor_window(Address(BASES[0]), tensor)])
    memory.view(Address(BASES[0] + 8), 4).fill_(7)
    assert tensor.tolist() == [0] * 8 + [7] * 4 + [0] * 52
    with pytest.raises(AddressError, match="is outside"):
        memory.view(Address(BASES[0] + 8), 57)
    with pytest.raises(AddressError, match="in no mapped region"):
        memory.view(Address(8), 1)


def test_only_tensors_on_the_host_can_be_read_straight_from_their_pages() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    memory = TorchMemory([tensor_window(Address(BASES[0]), tensor)])
    place = runs([(BASES[0] + 32, 8, 4), (BASES[0] + 8, 0, 8), (BASES[0] + 36, 12, 2)])
    found = memory.runs(place)
    assert found.addresses.u64.tolist() == [tensor.data_ptr() + 8, tensor.data_ptr() + 32]
    assert found.lengths.tolist() == [8, 6]
    assert [span.ctypes.data for span in memory.spans] == [tensor.data_ptr()]
    assert memory.runs(runs([])).nbytes == 0
    memory.device = torch.device("meta")
    assert memory.spans == []
    with pytest.raises(TransportError, match="use gather='always'"):
        memory.runs(place)
    with pytest.raises(AddressError, match="torch has no streams"):
        TorchMemory([map_tensor(torch.zeros(8, device="meta"))])


class Recorder:
    """Stands in for torch's module of an accelerator, and logs what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.finished: set[str] = set()
        self.engine = "engine stream"

    def Stream(self, device: Any) -> _Stream:  # named as torch's
        return _Stream(self)

    def Event(self) -> _Event:
        return _Event(self)

    def current_stream(self, device: Any) -> str:
        return self.engine

    def synchronize(self, device: Any) -> None:
        self.log.append("wait for all")

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.log.append("on our stream")
        yield
        self.log.append("off")


class _Stream:
    def __init__(self, module: Recorder) -> None:
        self.module = module

    def __str__(self) -> str:
        return "our stream"

    def wait_event(self, event: _Event) -> None:
        self.module.log.append(f"after {event.of}")


class _Event:
    def __init__(self, module: Recorder) -> None:
        self.module, self.of = module, ""

    def record(self, stream: Any) -> None:
        self.of = str(stream)

    def query(self) -> bool:
        return self.of in self.module.finished

    def synchronize(self) -> None:
        self.module.log.append(f"wait for {self.of}")


def test_copies_come_after_the_fences_and_have_ended_on_return() -> None:
    module = Recorder()
    order = StreamOrder(module, "a device")

    def copy() -> list[str]:
        module.log.clear()
        with order.ordered():
            module.log.append("copy")
        return module.log

    ended = ["copy", "wait for our stream", "off"]
    assert copy() == ["wait for all", "on our stream", *ended]  # no fence yet: only the whole device is safe
    wait = order.fence()
    assert copy() == ["on our stream", "after engine stream", *ended]
    module.engine = "second stream"
    order.fence()
    assert copy() == ["on our stream", "after engine stream", "after second stream", *ended]
    module.log.clear()
    wait()  # for what it was made for, and not for what came after
    assert module.log == ["wait for engine stream"]
    module.finished = {"engine stream", "second stream"}
    module.engine = "third stream"
    order.fence()  # what has ended is forgotten
    assert copy() == ["on our stream", "after third stream", *ended]


def test_a_failed_copy_is_waited_for_too() -> None:
    module = Recorder()
    with pytest.raises(ZeroDivisionError), StreamOrder(module, "a device").ordered():
        raise ZeroDivisionError
    assert "wait for our stream" in module.log


def test_landing_slots_of_a_device() -> None:
    staging = DeviceStaging(3, 5000, "cpu", Address(BASES[0]))
    assert (staging.slots, staging.slot_bytes, staging.layout.stride_bytes) == (3, 5000, 8192)
    assert bytes(staging.memory[:24].tolist()) == b"kvferry1" + staging.key
    assert staging.address(2).value == BASES[0] + 2 * 8192
    staging.view(1).fill_(7)
    written = torch.nonzero(staging.memory == 7).flatten()
    assert len(set(written.tolist()) - set(range(24))) == 5000 and int(written[-1]) == 4096 + 8192 + 4999
    for slot in (-1, 3):
        with pytest.raises(TransportError, match="of 3 slots"):
            staging.view(slot)
    for _ in range(2):
        staging.close()
    with pytest.raises(TransportError, match="closed"):
        staging.view(0)
    with pytest.raises(DocumentError, match="slots and slot_bytes"):
        DeviceStaging(1, 0, "cpu")


@pytest.mark.parametrize(("transport", "gather"), [("shm", "always"), ("tcp", "always"), ("process_vm", "never")])
def test_an_endpoint_takes_tensors_where_it_takes_host_memory(transport: str, gather: Any) -> None:
    """Landing memory on the host: one head of two goes to each of two target workers."""
    source = uniform_instance("p", 2, 2, 8, tp=1, page_tokens=4, pages=8, bases=BASES[0], packing="one_tensor")
    target = uniform_instance("d", 2, 2, 8, tp=2, page_tokens=4, pages=8, bases=BASES[0], packing="one_tensor")
    rng = np.random.default_rng(0)
    shapes = [(2, 2, 8, 4, 2, 16), (2, 2, 8, 4, 1, 16), (2, 2, 8, 4, 1, 16)]  # layer, part, page, token, head, bytes
    pools = [torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]
    expected = [pool.clone() for pool in pools[1:]]
    for rank, pool in enumerate(expected):
        pool[:, :, [6, 1]] = pools[0][:, :, [3, 5]][..., rank : rank + 1, :]
    sides = [Side({"attn": Table(pages)}) for pages in ((3, 5), (6, 1))]
    wanted = {"attn": Wanted((0, 8))}
    with ExitStack() as stack:
        registry = stack.enter_context(RegistryServer()).url
        ends = []
        memories: list[Any] = [TorchMemory([tensor_window(Address(BASES[0]), pool)]) for pool in pools]
        for instance, rank, memory in zip((source, target, target), (0, 0, 1), memories):
            world = len(instance.workers)
            settings = {"world": world, "registry": registry, "transport": transport, "gather": gather}
            ends.append(stack.enter_context(Endpoint(instance, rank, memory, **settings)))
        running = [(ends[0], ends[0].send("t", wanted, sides[0], timeout_s=30, fence=memories[0].fence()))]
        running += [(end, end.receive("t", "p", wanted, sides[1], timeout_s=30)) for end in ends[1:]]
        reports = [end.wait(transfer) for end, transfer in running]
    assert [report.bytes for report in reports] == [2 * 2 * 8 * 2 * 16, 2 * 2 * 8 * 16, 2 * 2 * 8 * 16]
    assert all(torch.equal(pool, want) for pool, want in zip(pools[1:], expected))


def run_check(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(CHECK), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=CHECK.parents[1])
    return ended.returncode, ended.stdout, ended.stderr


DEVICE_LANDING = pytest.mark.skipif(
    "memory" not in NixlCard.__struct_fields__, reason="the nixl transport does not take device memory yet"
)


@pytest.mark.skipif(bool(NIXL_PROBLEM), reason=NIXL_PROBLEM)
@pytest.mark.parametrize("landing", ["host", pytest.param("device", marks=DEVICE_LANDING)])
def test_the_check_passes_on_tensors_in_host_memory(landing: str) -> None:
    sizes = ("--tokens", "48", "--layers", "2", "--slots", "2", "--slot-bytes", "65536")
    code, out, problem = run_check("--device", "cpu", "--landing", landing, "--json", *sizes)
    assert code == 0, out + problem
    cases = json.loads(out)["cases"]
    assert [case["name"] for case in cases] == [
        f"TP {ours} → {theirs}, {landing} landing" for ours, theirs in ((1, 1), (2, 2), (1, 2), (2, 1))
    ]
    for case in cases:
        assert (case["pass"], case["wrong_bytes"], case["bytes"]) == (True, 0, 2 * 2 * 48 * 8 * 256)


def test_the_check_says_what_is_wrong_and_what_is_missing() -> None:
    check = runpy.run_path(str(CHECK))
    cells = np.random.default_rng(0).integers(0, 256, (1, 2, 32, 8, 256), dtype=np.uint8)
    case = check["Case"](1, 1, "host", "tcp", 1, 32, 2, 65536)
    pool = check["Pool"](case, case.instance("target").workers[0], "cpu", 1)
    assert pool.wrong_bytes(pool.expected(cells[:, :, :0], [])) == 0
    pool.fill(pool.expected(cells, [3, 0]))
    assert pool.wrong_bytes(pool.expected(cells, [3, 0])) == 0
    assert pool.wrong_bytes(pool.expected(cells, [0, 3])) > 100_000
    for at in (0, 4095, -1, -4096, 4096 + 5 * 16 * 2048):  # the guards, and a page that nothing is written to
        pool._blocks[1][at] += 1
        assert pool.wrong_bytes(pool.expected(cells, [3, 0])) == 1
        pool._blocks[1][at] -= 1
    row = check["Row"]("one", bytes=1, wrong_bytes=1)
    assert not row.passed and "FAIL: 1 wrong bytes" in check["table"]([row])
    assert not check["Row"]("nothing moved").passed
    assert "FAIL: broken" in check["table"]([check["Row"]("one", bytes=1, problem="broken")])
    code, out, problem = run_check("--device", "no such device", "--json")
    assert (code, out) == (2, "") and problem.startswith("nothing was checked: device 'no such device' can't be used")
    assert problem.count("\n") == 1


def measure_beside_host_memory(total_bytes: int = 64 << 20, run_bytes: int = 512) -> dict[str, float]:
    """Best of three, in GB/s: pages in random order into a dense chunk and back."""
    source = np.random.default_rng(0).integers(0, 256, 2 * total_bytes, dtype=np.uint8)
    count = total_bytes // run_bytes
    at = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.uint64) * np.uint64(run_bytes)
    dense = np.arange(count, dtype=np.uint64) * np.uint64(run_bytes)
    copies = Runs(Addresses([map_array(source).base]).plus(at), dense, np.full(count, run_bytes, np.uint64))
    host, tensors = HostMemory([map_array(source)]), TorchMemory([map_tensor(torch.from_numpy(source))])
    chunk = np.zeros(total_bytes, np.uint8)
    speeds = {}
    for name, action in (
        ("host gather", host.gather),
        ("torch gather", tensors.gather),
        ("host scatter", host.scatter),
        ("torch scatter", tensors.scatter),
    ):
        times = []
        for _ in range(3):
            started = time.perf_counter()
            action(copies, chunk)
            times.append(time.perf_counter() - started)
        speeds[name] = total_bytes / min(times) / 1e9
    return speeds


if __name__ == "__main__":
    for name, speed in measure_beside_host_memory().items():
        print(f"{name:14} {speed:6.2f} GB/s")
