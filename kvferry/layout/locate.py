"""Exact paths for faults that the decoder places only roughly.

It writes `[...]` for a key of an object and leaves out where an array is too long. Both are found by looking again,
for refused documents only.
"""

from __future__ import annotations

from typing import Any, TypeVar, Union

import msgspec

from kvferry.errors import DocumentError
from kvferry.layout.document import decode_json

T = TypeVar("T")
_SOME_KEY = "[...]"
_LENGTHS = {"modes": 3, "buffers": 5}


def decode(data: Union[bytes, str], kind: type[T]) -> T:
    """As `decode_json`, with the exact path in the DocumentError."""
    try:
        return decode_json(data, kind)
    except DocumentError as error:
        raise _located(data, kind, error) from None


def _located(data: Union[bytes, str], kind: type[Any], error: DocumentError) -> DocumentError:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return error  # no JSON at all: there is no path
    if "at most length" in error.problem and not error.path:
        return _too_long(document, error)
    keys: list[str] = []
    while _SOME_KEY in error.path:
        prefix = error.path.partition(_SOME_KEY)[0]
        holder = document
        for step in _steps(prefix, keys):
            holder = holder[step]
        key, found = _first_bad_key(document, holder, kind, error)
        keys.append(key)
        # keys found earlier come back as `[...]` in each new error
        path = found.path
        for known in keys:
            path = path.replace(_SOME_KEY, f".{known}", 1)
        error = DocumentError(path, found.problem)
    return error


def _first_bad_key(
    document: Any, holder: dict[str, Any], kind: type[Any], error: DocumentError
) -> tuple[str, DocumentError]:
    """Bisect the keys of `holder`, which lies in `document` and is left with the bad one."""
    items = list(holder.items())
    while True:
        half = items[: max(len(items) // 2, 1)]
        holder.clear()
        holder.update(half)
        try:
            decode_json(msgspec.json.encode(document), kind)
        except DocumentError as again:
            if len(half) == 1:
                return half[0][0], again
            items = half
        else:
            items = items[len(half) :]
            if not items:
                return "?", error


def _steps(path: str, keys: list[str]) -> list[Union[str, int]]:
    """`workers.3.tables` or `groups[0].axes` as keys and indices; known keys may hold dots and are cut out whole."""
    steps: list[Union[str, int]] = []
    waiting = list(keys)
    while path:
        if waiting and steps and path.startswith(f".{waiting[0]}"):
            step = waiting.pop(0)
            steps.append(step)
            path = path[len(step) + 1 :]
        elif path.startswith("["):
            index, _, path = path[1:].partition("]")
            steps.append(int(index))
        else:
            path = path.removeprefix(".")
            end = min((place for place in (path.find("."), path.find("[")) if place >= 0), default=len(path))
            steps.append(path[:end])
            path = path[end:]
    return steps


def _too_long(document: Any, error: DocumentError) -> DocumentError:
    try:
        for number, worker in enumerate(document["workers"]):
            for index, pool in enumerate(worker["pools"]):
                for field, length in _LENGTHS.items():
                    for place, row in enumerate(pool.get(field, [])):
                        if len(row) > length:
                            path = f"workers[{number}].pools[{index}].{field}[{place}]"
                            return DocumentError(path, f"expected array of length {length}, got {len(row)}")
    except (KeyError, TypeError, AttributeError):
        pass  # more than one thing is wrong with it
    return error
