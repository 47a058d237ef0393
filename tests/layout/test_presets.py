"""Presets and live tensors: the layouts mean what their names say, checked against NumPy's own indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.errors import DocumentError
from kvferry.layout import presets
from kvferry.layout.address import Address
from kvferry.layout.document import Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.tensors import pool_of, view_of
from kvferry.layout.validate import check_instance

PAGES, TOKENS, HEADS, DIM = 5, 6, 3, 8
SHAPES = {"nhd": (TOKENS, HEADS, DIM), "hnd": (HEADS, TOKENS, DIM), "vectorised": (HEADS, DIM // 4, TOKENS, 4)}
NAMES = {
    "nhd": ("token", "head", "dim"),
    "hnd": ("head", "token", "dim"),
    "vectorised": ("head", "dim", "token", "dim"),
}


def element(layout: str, page: npt.NDArray[Any], token: int, head: int, dim: int) -> Any:
    """The element of one page that NumPy finds there."""
    if layout == "nhd":
        return page[token, head, dim]
    if layout == "hnd":
        return page[head, token, dim]
    return page[head, dim // 4, token, dim % 4]


def place(modes: tuple[Mode, ...], **index: int) -> int:
    total = 0
    for mode in reversed(modes):
        total += index[mode.axis] % mode.extent * mode.stride_bytes
        index[mode.axis] //= mode.extent
    return total


@pytest.mark.parametrize("layout", presets.LAYOUTS)
def test_modes_agree_with_numpy(layout: str) -> None:
    modes, page_bytes = presets.modes_of(layout, TOKENS, HEADS, DIM, 4)
    page = np.arange(TOKENS * HEADS * DIM, dtype=np.float32).reshape(SHAPES[layout])
    assert page_bytes == page.nbytes
    flat = page.ravel()
    for token, head, dim in np.ndindex(TOKENS, HEADS, DIM):
        assert flat[place(modes, token=token, head=head, dim=dim) // 4] == element(layout, page, token, head, dim)


@pytest.mark.parametrize(
    ("heads", "tp", "shares"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (12, 3, [(0, 4), (4, 8), (8, 12)]),
        (4, 3, [(0, 1), (1, 2), (2, 4)]),
        (5, 2, [(0, 2), (2, 5)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),  # F10: replicas
        (2, 3, [(0, 1), (0, 1), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_of_a_rank(heads: int, tp: int, shares: list[tuple[int, int]]) -> None:
    assert [presets.tp_heads(heads, tp, rank) for rank in range(tp)] == [(share,) for share in shares]


@pytest.mark.parametrize("heads", range(1, 13))
@pytest.mark.parametrize("tp", range(1, 17))
def test_every_head_has_a_rank_and_every_rank_a_head(heads: int, tp: int) -> None:
    held = [
        head for rank in range(tp) for start, stop in presets.tp_heads(heads, tp, rank) for head in range(start, stop)
    ]
    assert sorted(set(held)) == list(range(heads))
    assert len(held) == max(heads, tp)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        presets.tp_heads(4, 2, 2)
    with pytest.raises(ValueError, match="no stage 1 of 1"):
        presets.pp_layers(range(4), 1, 1)
    with pytest.raises(ValueError, match="expected one of nhd, hnd, vectorised"):
        presets.modes_of("ndh", 1, 1, 1, 1)
    with pytest.raises(ValueError, match="expected one of separate, interleaved, one_tensor"):
        presets.pack("loose", [0], ["k"], 1, 1)
    with pytest.raises(ValueError, match="no multiple"):
        presets.vectorised(4, 1, 12, 2)
    with pytest.raises(ValueError, match="4 workers need as many bases, got 1"):
        presets.uniform_instance("p", 4, 4, 8, 2, 2, bases=[0])


@pytest.mark.parametrize("packing", presets.PACKINGS)
@pytest.mark.parametrize("layout", presets.LAYOUTS)
def test_uniform_instances_are_valid_and_end_where_they_say(layout: str, packing: str) -> None:
    low = presets.uniform_instance(
        "p", 5, 4, 16, 3, 2, layout=layout, packing=packing, page_tokens=4, pages=7, dtype="float16"
    )
    assert [worker.rank for worker in low.workers] == list(range(6))
    layers = [sorted({buffer.layer for buffer in worker.pools[0].buffers}) for worker in low.workers]
    assert layers == [[0, 1]] * 3 + [[2, 3, 4]] * 3
    sizes = [presets.memory_bytes(worker) for worker in low.workers]
    needed = [len(layers[rank]) * 2 * 7 * 4 * [1, 1, 2][rank % 3] * 16 * 2 for rank in range(6)]
    assert all(need <= size < need + 64 * 10 for need, size in zip(needed, sizes, strict=True))
    top = presets.uniform_instance(
        "p", 5, 4, 16, 3, 2, layout=layout, packing=packing, page_tokens=4, pages=7, dtype="float16",
        bases=[2**64 - size for size in sizes],
    )  # fmt: skip
    assert str(top.workers[0].regions[-1].base).startswith("0xfffffff")
    with pytest.raises(Exception, match=r"2\*\*64"):
        presets.uniform_instance(
            "p", 5, 4, 16, 3, 2, layout=layout, packing=packing, page_tokens=4, pages=7, dtype="float16",
            bases=[2**64 - size + 1 for size in sizes],
        )  # fmt: skip


def test_stages_may_be_uneven_and_interleaved() -> None:
    instance = presets.uniform_instance("p", [3, 1, 7], 2, 4, 1, stages=[[7, 3], [1]])
    assert [[b.layer for b in worker.pools[0].buffers] for worker in instance.workers] == [[7, 7, 3, 3], [1, 1]]


GROUP = presets.attention_group(2, HEADS, DIM, "float32")


def whole(region: Region, pool: Pool, group: Group = GROUP) -> Instance:
    worker = Worker(0, (region,), (pool,))
    return check_instance(Instance("kvferry-instance/1", "p", "m", (group,), (worker,)))


@pytest.mark.parametrize("layout", presets.LAYOUTS)
def test_a_numpy_pool_reads_its_own_strides(layout: str) -> None:
    array = np.zeros((PAGES, 2, *SHAPES[layout]), dtype=np.float32)
    region, pool = pool_of(array, ("page", "part", *NAMES[layout]), GROUP, layers=[1], parts=["k", "v"])
    whole(region, pool)
    assert region.base == Address(array.ctypes.data)
    assert region.bytes == array.nbytes
    assert pool.page_tokens == TOKENS
    assert pool.page_bytes == 2 * TOKENS * HEADS * DIM * 4
    assert pool.modes == presets.modes_of(layout, TOKENS, HEADS, DIM, 4)[0]
    k, v = pool.buffers
    assert (k.layer, k.part, k.offset_bytes, k.pages) == (1, "k", 0, PAGES)
    assert (v.layer, v.part, v.offset_bytes, v.pages) == (1, "v", TOKENS * HEADS * DIM * 4, PAGES)


def test_padded_and_transposed_views_and_larger_regions() -> None:
    storage = np.zeros((2, PAGES, HEADS, TOKENS + 1, DIM + 2), dtype=np.float32)
    view = storage[:, 1:, :, :TOKENS, :DIM].transpose(1, 0, 3, 2, 4)  # page, layer, token, head, dim
    within = Region(Address(storage.ctypes.data), storage.nbytes)
    region, pool = pool_of(
        view, ("page", "layer", "token", "head", "dim"), GROUP, layers=[0, 1], parts=["k"], within=within
    )
    assert region is within
    whole(region, pool)
    row, head_step = (DIM + 2) * 4, (TOKENS + 1) * (DIM + 2) * 4
    assert pool.modes == (Mode("token", TOKENS, row), Mode("head", HEADS, head_step), Mode("dim", DIM, 4))
    assert pool.page_bytes == HEADS * head_step
    assert [buffer.offset_bytes for buffer in pool.buffers] == [pool.page_bytes, (PAGES + 1) * pool.page_bytes]
    assert {buffer.pages for buffer in pool.buffers} == {PAGES - 1}
    small = Region(within.base, storage.nbytes - 20 * row)
    with pytest.raises(DocumentError, match="ends at byte"):
        pool_of(view, ("page", "layer", "token", "head", "dim"), GROUP, layers=[0, 1], parts=["k"], within=small)
    late = Region(Address(view.ctypes.data + 1), storage.nbytes)
    with pytest.raises(DocumentError, match="starts before its region"):
        pool_of(view, ("page", "layer", "token", "head", "dim"), GROUP, layers=[0, 1], parts=["k"], within=late)


class FakeDeviceTensor:
    """Stands in for a tensor on an accelerator: an address with bit 63 set, and no memory behind it."""

    shape = (PAGES, TOKENS, HEADS, DIM)
    dtype = "torch.float32"

    class device:
        type = "xpu"
        index = 3

    def data_ptr(self) -> int:
        return 0xFFFF81AB54E01000

    def element_size(self) -> int:
        return 4

    def stride(self) -> tuple[int, ...]:
        return (TOKENS * HEADS * DIM, HEADS * DIM, DIM, 1)


def test_f1_a_device_tensor_with_bit_63_set() -> None:
    region, pool = pool_of(FakeDeviceTensor(), ("page", *NAMES["nhd"]), GROUP, layers=[0], parts=["v"])
    assert region == Region(Address(0xFFFF81AB54E01000), PAGES * TOKENS * HEADS * DIM * 4, "device", 3)
    whole(region, pool)


def test_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    storage = torch.zeros(2, PAGES, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    group = presets.attention_group(1, HEADS, DIM)
    region, pool = pool_of(storage, ("part", "page", *NAMES["nhd"]), group, layers=[0], parts=["k", "v"])
    whole(region, pool, group)
    assert region == Region(Address(storage.data_ptr()), storage.numel() * 2)
    assert pool.modes == presets.nhd(TOKENS, HEADS, DIM, 2)[0]
    assert view_of(storage[1]).address == Address(storage.data_ptr()).plus(storage[0].numel() * 2)


def test_anything_with_dlpack() -> None:
    class Boxed:
        def __init__(self, array: npt.NDArray[Any]) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    array = np.zeros((PAGES, *SHAPES["hnd"]), dtype=np.float32)
    assert view_of(Boxed(array)) == view_of(array)
    axes = ("page", *NAMES["hnd"])
    assert (
        pool_of(Boxed(array), axes, GROUP, layers=[0], parts=["k"])[1]
        == pool_of(array, axes, GROUP, layers=[0], parts=["k"])[1]
    )


def test_owned_segments_and_cycles_are_taken_over() -> None:
    array = np.zeros((PAGES, *SHAPES["nhd"]), dtype=np.float32)
    group = presets.attention_group(1, 2 * HEADS, DIM, "float32")
    owned: dict[str, Any] = {"head": [[3, 6]], "token": [1, 2, 4]}
    region, pool = pool_of(array, ("page", *NAMES["nhd"]), group, layers=[0], parts=["k"], owned=owned)
    whole(region, pool, group)
    assert pool.owned == {"head": ((3, 6),), "token": (1, 2, 4)}
    assert pool.cycle == (1, 2, 4)


NHD = np.zeros((PAGES, *SHAPES["nhd"]), dtype=np.float32)


@pytest.mark.parametrize(
    ("tensor", "axes", "layers", "problem"),
    [
        ([1, 2], ("page", "dim"), [0], "expected data_ptr"),
        (NHD[::-1], ("page", *NAMES["nhd"]), [0], "strides\\[0\\]: must be ≥ 1, got -"),
        (np.broadcast_to(NHD[:1], NHD.shape), ("page", *NAMES["nhd"]), [0], "strides\\[0\\]: must be ≥ 1, got 0"),
        (NHD, NAMES["nhd"], [0], "the tensor has 4 dimensions, got 3 names"),
        (
            NHD,
            ("page", "token", "heads", "dim"),
            [0],
            "axes\\[2\\]: expected one of page, token, layer, part, head, dim",
        ),
        (NHD, ("page", "page", "head", "dim"), [0], "'page' may be named once"),
        (NHD, ("page", *NAMES["nhd"]), [0, 1], "layers: the tensor holds 1 layer"),
        (NHD, ("page", *NAMES["nhd"]), [], "layers: the tensor holds 1 layer"),
        (NHD.astype(np.float16), ("page", *NAMES["nhd"]), [0], "float32 of 4 bytes, got float16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    tensor: Any, axes: tuple[str, ...], layers: list[int], problem: str
) -> None:
    with pytest.raises(DocumentError, match=problem):
        pool_of(tensor, axes, GROUP, layers=layers, parts=["k"])
