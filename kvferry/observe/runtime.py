"""Where the endpoints of this user on this host can be asked: a folder with one Unix socket per endpoint.

The folder is KVFERRY_RUN, else /tmp/kvferry-UID. It belongs to one user and nobody else may enter it, so whoever can
reach a socket could also have read the process's memory.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import DocumentError

VARIABLE = "KVFERRY_RUN"
SUFFIX = ".sock"
_NAME_LIMIT = 40  # characters of the instance's name: with all the rest a socket's path has room for 107
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


@dataclass(frozen=True)
class Door:
    """One endpoint's socket, as its file's name tells it: the instance's name may be cut."""

    path: Path
    instance: str
    rank: int
    pid: int
    generation: int

    def __str__(self) -> str:
        return f"{self.instance}/{self.rank}"


def run_folder() -> Path:
    return Path(os.environ.get(VARIABLE) or f"/tmp/kvferry-{os.getuid()}")


def open_folder(folder: Path) -> int:
    """A descriptor of the folder, which is made if need be. DocumentError where others could be in it, OSError where it
    can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        problem = (
            f"must belong to you alone (mode 0700), it has owner {found.st_uid} and mode {found.st_mode & 0o777:o}"
        )
        raise DocumentError(str(folder), f"{problem}; set {VARIABLE} to another folder")
    return descriptor


def listen(folder: Path, instance: str, rank: int, generation: int) -> tuple[socket.socket, Path]:
    """A socket that listens, and its file. Errors are those of `open_folder`."""
    safe = "".join(c if (c.isalnum() and c.isascii()) or c in "-_" else "_" for c in instance[:_NAME_LIMIT])
    name = f"{safe}.{rank}.{os.getpid()}.{generation}{SUFFIX}"
    descriptor = open_folder(folder)
    try:
        _sweep(descriptor)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # named when it listens: one that doesn't yet looks like one of a process that is gone
            listening.bind(f"/proc/self/fd/{descriptor}/.{name}")
            listening.listen(16)
            os.rename(f".{name}", name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        except BaseException:
            listening.close()
            raise
    finally:
        os.close(descriptor)
    return listening, folder / name


def doors(folder: Path) -> list[Door]:
    """Whom there is to ask, by name. Nobody where there is no such folder; DocumentError where it isn't ours."""
    if not folder.exists():
        return []
    if os.getuid() != 0:
        os.close(open_folder(folder))
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        parts = path.name.removesuffix(SUFFIX).rsplit(".", 3)
        if len(parts) == 4 and all(part.isdecimal() for part in parts[1:]):
            found.append(Door(path, parts[0], *(int(part) for part in parts[1:])))
    return found


def may_ask(connection: socket.socket) -> bool:
    """Whether the other end is this user, or root."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(data)[1]
    return uid in (0, os.getuid())


def connect(path: Path, timeout_s: float) -> socket.socket:
    """OSError where nobody listens there any more, or nobody takes the connection in time."""
    descriptor = os.open(path.parent, os.O_DIRECTORY | os.O_CLOEXEC)
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asking.settimeout(timeout_s)
        asking.connect(f"/proc/self/fd/{descriptor}/{path.name}")
    except BaseException:
        asking.close()
        raise
    finally:
        os.close(descriptor)
    return asking


def _sweep(descriptor: int) -> None:
    """Remove the sockets of processes that are gone."""
    for name in os.listdir(descriptor):
        if name.endswith(SUFFIX) and not name.startswith("."):
            with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as asking:
                asking.setblocking(False)
                try:
                    asking.connect(f"/proc/self/fd/{descriptor}/{name}")
                except ConnectionRefusedError:
                    try:
                        os.unlink(name, dir_fd=descriptor)
                    except FileNotFoundError:
                        pass  # swept by another endpoint that starts
                except OSError:
                    pass  # a process that is stopped
