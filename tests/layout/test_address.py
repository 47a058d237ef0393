"""The address type: the whole 64-bit range, every sum checked, every other dtype refused at the door."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import AddressError
from kvferry.layout.address import SPACE, Address, Addresses, join, offsets, size

LAST = SPACE - 1
DEVICE = 0xFFFF81AB54E01000
EDGES = [0, 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, DEVICE, LAST - 2047, LAST]
anywhere = st.one_of(st.sampled_from(EDGES), st.integers(0, LAST))


@given(anywhere)
def test_an_address_is_kept_exactly(value: int) -> None:
    address = Address(value)
    assert address.value == value
    assert str(address) == hex(value)
    assert Address.parse(str(address)) == address
    assert Addresses([address]).hex() == [hex(value)]
    assert Addresses([address]).u64.dtype == np.uint64
    assert int(Addresses([address]).u64[0]) == value
    assert pickle.loads(pickle.dumps(address)) == address
    assert hash(address) == hash(Address(value))


@given(anywhere, anywhere)
def test_sums_are_exact_or_refused(base: int, nbytes: int) -> None:
    one, many = Address(base), Addresses([Address(base), Address(0)])
    if base + nbytes < SPACE:
        assert one.plus(nbytes) == Address(base + nbytes)
        assert many.plus(nbytes).hex() == [hex(base + nbytes), hex(nbytes)]
        assert one.plus(nbytes).distance_from(one) == nbytes
    else:
        with pytest.raises(AddressError, match=r"passes 2\*\*64"):
            one.plus(nbytes)
        with pytest.raises(AddressError, match=r"passes 2\*\*64 at index \[0\]"):
            many.plus(nbytes)
    assert one.spans(nbytes) == (base + nbytes <= SPACE)


@given(anywhere, anywhere, st.integers(0, 2**63 - 1), anywhere)
def test_f5_bounds_never_wrap(base: int, address: int, nbytes: int, length: int) -> None:
    inside = base <= address and address + length <= base + nbytes
    many = Addresses([Address(address)])
    if inside:
        assert many.offsets_in(Address(base), nbytes, length, "here").tolist() == [address - base]
    else:
        with pytest.raises(AddressError, match="here: "):
            many.offsets_in(Address(base), nbytes, length, "here")


def test_f5_the_field_case() -> None:
    with pytest.raises(AddressError, match="outside 0x1000 \\+ 8192"):
        Addresses([Address(2**64 - 8)]).offsets_in(Address(4096), 8192, 16, "copy")
    top = Addresses([Address(2**64 - 16)]).offsets_in(Address(2**64 - 4096), 4096, 16, "copy")
    assert top.tolist() == [4080]


def test_f3_page_number_times_page_bytes() -> None:
    pages = np.array([2**20], dtype=np.uint64)
    assert Addresses([Address(DEVICE)]).plus(pages * np.uint64(4096)).hex() == [hex(DEVICE + 2**32)]


def test_f1_a_base_above_2_63_stays_exact_where_plain_numpy_does_not() -> None:
    with np.errstate(all="ignore"):
        naive = int((np.array([DEVICE], np.uint64) + np.array([256], np.int64)).astype(np.uint64)[0])
    assert naive != DEVICE + 256
    assert Addresses([Address(DEVICE)]).plus(256).hex() == [hex(DEVICE + 256)]
    with pytest.raises(AddressError, match="expected an array of uint64, got int64"):
        Addresses([Address(DEVICE)]).plus(np.array([256], np.int64))


DTYPES = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "float32",
    "float64",
    "bool",
    "object",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_f4_arrays_of_any_other_dtype_are_refused(dtype: str) -> None:
    values: Any = np.ones(3, dtype=dtype)
    for door in (offsets, Addresses, Addresses([Address(0)]).plus):
        with pytest.raises(AddressError, match=f"expected an array of uint64, got {dtype}"):
            door(values)


@pytest.mark.parametrize("value", [1.0, True, np.float64(4), np.bool_(True), "4", None, b"4", Decimal(4), [1], 1j])
def test_no_other_type_becomes_a_size(value: Any) -> None:
    with pytest.raises(AddressError, match="expected an integer"):
        size(value)
    with pytest.raises(AddressError, match="expected an integer"):
        Address(value)
    with pytest.raises(AddressError):
        Address(0).plus(value)


@pytest.mark.parametrize("value", [-1, -(2**63), SPACE, SPACE + 1, 2**100, np.int64(-1)])
def test_numbers_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(AddressError, match=r"must be in 0 … 2\*\*64-1"):
        size(value)
    with pytest.raises(AddressError, match=r"must be in 0 … 2\*\*64-1"):
        Address(value)
    with pytest.raises(AddressError):
        Addresses([Address(0)]).plus(value)


@pytest.mark.parametrize("value", [np.uint64(LAST), np.int64(7), np.uint8(7)])
def test_numpy_integers_are_integers(value: Any) -> None:
    assert Address(value).value == int(value)


@pytest.mark.parametrize("text", ["0x0", "0xffffffffffffffff", "0xFFFF81ab54E01000", "0x0000000000000000000001"])
def test_texts_that_are_addresses(text: str) -> None:
    assert Address.parse(text).value == int(text, 16)


@pytest.mark.parametrize(
    "text",
    ["", "0x", "12", "ff", "0X10", "-0x10", "0x-1", "0x_1", "0x1_0", " 0x1", "0x1 ", "0xg", "0x１", 16, 1.5, None],
)
def test_texts_that_are_not(text: object) -> None:
    with pytest.raises(AddressError, match="expected a hex string"):
        Address.parse(text)


def test_a_text_past_the_last_address() -> None:
    with pytest.raises(AddressError, match="past the last address"):
        Address.parse("0x10000000000000000")


def test_an_address_cannot_be_changed_or_calculated_with() -> None:
    address: Any = Address(DEVICE)
    many: Any = Addresses([address])
    with pytest.raises(AttributeError, match="immutable"):
        address.value = 1
    with pytest.raises(ValueError, match="read-only"):
        many.u64[0] = 1
    for thing in (address, many):
        for other in (1, np.uint64(1), address):
            with pytest.raises(TypeError):
                thing + other
            with pytest.raises(TypeError):
                thing - other
        with pytest.raises(TypeError):
            int(thing)
        with pytest.raises(TypeError):
            float(thing)
    assert address != DEVICE


def test_addresses_do_not_freeze_the_array_they_came_from() -> None:
    mine = np.array([1, 2], dtype=np.uint64)
    Addresses(mine)
    mine[0] = 5


def test_shapes_and_joining() -> None:
    grid = Addresses(np.arange(6, dtype=np.uint64)).reshape(2, 3)
    assert grid.plus(np.array([[10], [20]], dtype=np.uint64)).ravel().hex() == [
        "0xa",
        "0xb",
        "0xc",
        "0x17",
        "0x18",
        "0x19",
    ]
    assert join([grid, Addresses([Address(LAST)])]).hex()[-1] == hex(LAST)
    assert len(join([])) == 0
    assert grid.ravel().take(slice(1, 3)).hex() == ["0x1", "0x2"]
    with pytest.raises(AddressError, match=r"below"):
        Address(1).distance_from(Address(2))
