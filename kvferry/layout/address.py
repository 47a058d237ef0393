"""The only module that does arithmetic on memory addresses.

Device addresses use all 64 bits (0xffff81ab54e01000 is a real one), and NumPy makes three silent mistakes with them:
`uint64 + int64` becomes float64, `uint64 + uint64` wraps, and int32 page numbers times a page size wrap. So an address
is a type of its own, `Address` for one and `Addresses` for many, which refuses signed and float operands at the door
and checks every sum.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import AddressError

U64: TypeAlias = npt.NDArray[np.uint64]
Offsets: TypeAlias = U64 | np.uint64 | int

SPACE = 1 << 64
"""Bytes of the address space: every address is in 0 … SPACE - 1."""


def size(value: object, name: str = "size") -> int:
    """Return `value` as a byte count or offset in 0 … 2**64 - 1, else raise AddressError."""
    if isinstance(value, (bool, np.bool_, float, np.floating)):
        raise AddressError(f"{name}: expected an integer, got {value!r} of type {type(value).__name__}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # refused below when it is no integer
    except TypeError:
        raise AddressError(f"{name}: expected an integer, got {value!r} of type {type(value).__name__}") from None
    if not 0 <= number < SPACE:
        raise AddressError(f"{name}: must be in 0 … 2**64-1, got {number}")
    return number


def offsets(values: object, name: str = "offsets") -> U64:
    """Return byte offsets or sizes as uint64. A signed or float array is refused: convert page numbers with care
    before they get here.
    """
    if isinstance(values, np.ndarray):
        if values.dtype != np.uint64:
            raise AddressError(f"{name}: expected an array of uint64, got {values.dtype}")
        return values
    if isinstance(values, (int, np.integer)):
        return np.array(size(values, name), dtype=np.uint64)
    if isinstance(values, Sequence):
        return np.array([size(value, name) for value in values], dtype=np.uint64)
    raise AddressError(f"{name}: expected integers, got {type(values).__name__}")


class Address:
    """One address, an unsigned 64-bit integer. Prints and parses as a hex string; immutable."""

    __slots__ = ("value",)
    value: int

    def __init__(self, value: int) -> None:
        object.__setattr__(self, "value", size(value, "address"))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an Address is immutable")

    def __reduce__(self) -> tuple[type[Address], tuple[int]]:
        return Address, (self.value,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Address({self})"

    @staticmethod
    def parse(text: object) -> Address:
        """Read `"0xffff81ab54e01000"`. JSON numbers are refused: many parsers round them to 53 bits."""
        if not isinstance(text, str):
            raise AddressError(f'expected a hex string such as "0xffff81ab54e01000", got {text!r}')
        digits = text[2:]
        if not text.startswith("0x") or not digits or not set(digits) <= set("0123456789abcdefABCDEF"):
            raise AddressError(f'expected a hex string such as "0xffff81ab54e01000", got {text!r}')
        value = int(digits, 16)
        if value >= SPACE:
            raise AddressError(f"{text} is past the last address 0xffffffffffffffff")
        return Address(value)

    def __str__(self) -> str:
        return f"0x{self.value:x}"

    def plus(self, nbytes: int) -> Address:
        """The address `nbytes` further up; AddressError where that passes 2**64."""
        total = self.value + size(nbytes, "offset")
        if total >= SPACE:
            raise AddressError(f"{self} + {nbytes} passes 2**64")
        return Address(total)

    def minus(self, nbytes: int) -> Address:
        """The address `nbytes` further down; AddressError where that is below 0."""
        if size(nbytes, "offset") > self.value:
            raise AddressError(f"{self} - {nbytes} is below 0")
        return Address(self.value - nbytes)

    def distance_from(self, base: Address) -> int:
        """Bytes from `base` up to this address; AddressError where `base` is above it."""
        if base.value > self.value:
            raise AddressError(f"{self} is below {base}")
        return self.value - base.value

    def spans(self, nbytes: int) -> bool:
        """Whether `nbytes` bytes from here stay inside the address space (the last byte may be 2**64 - 1)."""
        return self.value + nbytes <= SPACE


class Addresses:
    """Many addresses: a read-only view of a uint64 array of any shape, with checked sums only."""

    __slots__ = ("_u64",)

    def __init__(self, values: U64 | Sequence[Address]) -> None:
        if isinstance(values, np.ndarray):
            u64 = offsets(values, "addresses").view()
        else:
            u64 = np.array([address.value for address in values], dtype=np.uint64)
        u64.flags.writeable = False
        self._u64 = u64

    def __len__(self) -> int:
        return len(self._u64)

    def __repr__(self) -> str:
        return f"Addresses({self.hex()})" if self._u64.size <= 8 else f"Addresses(<{self._u64.size}>)"

    @property
    def u64(self) -> U64:
        """The raw uint64 values, read-only: to hand to the operating system or a transport, not to calculate with."""
        return self._u64

    def hex(self) -> list[str]:
        return [f"0x{value:x}" for value in self._u64.ravel().tolist()]

    def take(self, index: npt.NDArray[np.intp] | slice) -> Addresses:
        return Addresses(self._u64[index])

    def reshape(self, *shape: int) -> Addresses:
        return Addresses(self._u64.reshape(*shape))

    def ravel(self) -> Addresses:
        return Addresses(self._u64.reshape(-1))

    def plus(self, addends: Offsets) -> Addresses:
        """Broadcasting sum with byte offsets; AddressError where any sum passes 2**64."""
        addend = offsets(addends)
        total: U64 = self._u64 + addend
        # exact integers: where the two largest operands stay below 2**64, no sum has wrapped
        if int(self._u64.max(initial=0)) + int(addend.max(initial=0)) < SPACE:
            return Addresses(total)
        # an unsigned sum wrapped exactly when it is below either operand
        wrapped = total < addend
        if wrapped.any():
            where = np.argwhere(np.atleast_1d(wrapped))[0].tolist()
            raise AddressError(f"address + offset passes 2**64 at index {where}")
        return Addresses(total)

    def distances_from(self, base: Address) -> U64:
        """Bytes from `base` up to each address; AddressError where one is below it."""
        return self.offsets_in(base, SPACE - 1 - base.value, 0, "addresses")

    def rows(self) -> tuple[Addresses, U64]:
        """Of each row of a matrix, its lowest address, [row, 1], and the bytes from there up to each, [row, column]."""
        lowest = self._u64.min(axis=1, keepdims=True)
        return Addresses(lowest), self._u64 - lowest

    def distances_to(self, address: Address) -> U64:
        """Bytes from each up to `address`, modulo 2**64: one above it gets a number larger than any real size."""
        distance: U64 = np.uint64(address.value) - self._u64
        return distance

    def lowest(self) -> Address:
        """The lowest of them; there must be one."""
        return Address(int(self._u64.min()))

    def first(self) -> Address:
        return Address(int(self._u64.ravel()[0]))

    def first_overlap(self, lengths: U64) -> int | None:
        """Index of a range [address, address + length) that another one reaches into, or None; adds to no address."""
        order = np.argsort(self._u64, kind="stable")
        start = self._u64[order]
        gap = start[1:] - start[:-1]  # sorted, so it never wraps
        clash = np.flatnonzero(gap < offsets(lengths, "lengths")[order][:-1])
        return int(order[clash[0] + 1]) if len(clash) else None

    def offsets_in(self, base: Address, nbytes: int, lengths: Offsets, what: str) -> U64:
        """Offsets from `base` of the ranges [address, address + length), each checked to lie inside [base, base +
        nbytes).

        No comparison here can wrap: lengths are compared with the room that is left, never added to an address.
        """
        start = np.uint64(base.value)
        length = offsets(lengths)
        offset = self._u64 - start
        limit = np.uint64(nbytes)
        bad = (self._u64 < start) | (length > limit) | (offset > limit - np.minimum(length, limit))
        if bad.any():
            first = int(np.flatnonzero(np.broadcast_to(bad, self._u64.shape).ravel())[0])
            address = int(self._u64.ravel()[first])
            count = int(np.broadcast_to(length, self._u64.shape).ravel()[first])
            raise AddressError(f"{what}: 0x{address:x} + {count} bytes is outside {base} + {nbytes} bytes")
        return offset


def join(parts: Sequence[Addresses]) -> Addresses:
    """Concatenate, flattened."""
    if len(parts) == 1:
        return parts[0].ravel()
    if not parts:
        return Addresses(np.empty(0, dtype=np.uint64))
    return Addresses(np.concatenate([part.u64.ravel() for part in parts]))
