"""The logs of every endpoint that can be asked on this host, and those in files."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import DocumentError
from kvferry.observe import runtime
from kvferry.observe.files import SUFFIX
from kvferry.observe.outlet import NUMBERS, TRACE
from kvferry.observe.records import Log, decode_log
from kvferry.observe.runtime import Door

ANSWER_S = 1.0
"""An endpoint that lives answers within milliseconds."""
MAX_BYTES = 256 << 20
STOPPED = {"T": "it is stopped (SIGCONT lets it go on)", "t": "a debugger holds it"}


@dataclass(frozen=True)
class Silent:
    """An endpoint whose process is there and does not answer."""

    worker: str
    generation: int
    problem: str


@dataclass(frozen=True)
class Gathered:
    logs: tuple[Log, ...]
    silent: tuple[Silent, ...] = ()


def ask_all(folder: Path, records: bool = True) -> Gathered:
    """Every endpoint in `folder`, side by side. `records`: with event logs, else only what runs and the numbers."""
    found = runtime.doors(folder)
    if not found:
        return Gathered(())
    with ThreadPoolExecutor(min(32, len(found))) as pool:
        answers = list(pool.map(lambda door: _ask(door, TRACE if records else NUMBERS), found))
    logs = tuple(answer for answer in answers if isinstance(answer, Log))
    return Gathered(logs, tuple(answer for answer in answers if isinstance(answer, Silent)))


def read_files(paths: Iterable[Path]) -> tuple[Log, ...]:
    """Of each file, and of each file in a folder. DocumentError, OSError for a named file that can't be read; in a
    folder, files that were removed meanwhile are left out.
    """
    logs = []
    for path in paths:
        if path.is_dir():
            for file in sorted(path.glob(f"*{SUFFIX}")):
                try:
                    logs.append(_read(file))
                except FileNotFoundError:
                    continue
        else:
            logs.append(_read(path))
    return tuple(logs)


def _read(path: Path) -> Log:
    if path.stat().st_size > MAX_BYTES:
        raise DocumentError(str(path), f"a log has at most {MAX_BYTES} bytes, this file has {path.stat().st_size}")
    return decode_log(path.read_bytes(), str(path))


def _ask(door: Door, word: bytes) -> Log | Silent | None:
    """None where the process is gone."""
    try:
        with runtime.connect(door.path, ANSWER_S) as asking:
            if _state(door.pid) in STOPPED:  # it would only let us wait
                return Silent(str(door), door.generation, _how(door.pid))
            asking.sendall(word + b"\n")
            end_s, data = time.monotonic() + ANSWER_S, bytearray()
            while piece := asking.recv(1 << 20):
                data += piece
                if len(data) > MAX_BYTES or (time.monotonic() > end_s + 10 * ANSWER_S):
                    return Silent(str(door), door.generation, f"process {door.pid} talks without end")
        return decode_log(bytes(data), str(door.path))
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except OSError:
        return Silent(str(door), door.generation, _how(door.pid))
    except DocumentError as error:
        return Silent(str(door), door.generation, f"process {door.pid} answers what is no log: {error}")


def _state(pid: int) -> str:
    """The letter of proc(5); empty where there is no such process here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _how(pid: int) -> str:
    """Why a process may not answer."""
    state = _state(pid)
    if not state:
        return f"process {pid} does not answer, and can't be seen from this pid namespace"
    why = STOPPED.get(state, "it is stuck, or this machine is overloaded")
    return f"process {pid} does not answer: {why}"
