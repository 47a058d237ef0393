"""Checks of this machine and this Python: no peer and no registry is asked."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

from kvferry.cli.doctor.finding import Finding
from kvferry.cli.doctor.units import size
from kvferry.errors import DocumentError, KVFerryError
from kvferry.session.keys import HOST_VARIABLE, Keys, access
from kvferry.transport.select import RDMA

AREA = "machine"
MIB = 1 << 20
GIB = 1 << 30
FILES_PER_PEER = 8
"""Descriptors that an endpoint opens for each peer: 4 were counted, the rest is room."""
FILES_LOW, FILES_FEW = 256, 4096
SHARED_LOW_BYTES, SHARED_FEW_BYTES = 32 * MIB, GIB
MEMORY_LOW_BYTES, MEMORY_FEW_BYTES = 128 * MIB, GIB
LOCKED_LOW_BYTES = 256 * MIB
FEW_CORES = 4
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and use, in version 2 and version 1 of control groups."""


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return _finding("yellow", "python", f"{version} is not supported", "use Python 3.10 to 3.13")
    if not hasattr(os, "pidfd_open"):
        problem = f"{version} has no os.pidfd_open: shared memory can't be used, deaths of peers aren't witnessed"
        return _finding("yellow", "python", problem, "use a Python that was built on Linux 5.3 or later")
    return _finding("green", "python", version)


def open_files(limit: int | None = None) -> Finding:
    """`limit`: descriptors that a process may have open, by default this one's soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return _finding("green", "open files", "no limit")
    found = f"{limit} per process, enough for about {max(0, limit - FILES_LOW // 2) // FILES_PER_PEER} peers"
    if limit < FILES_FEW:
        most = "" if hard == resource.RLIM_INFINITY else f" (at most {hard} here without root)"
        cure = f"ulimit -n 65536{most}, or LimitNOFILE=65536 in the service's unit, before the worker starts"
        return _finding("red" if limit < FILES_LOW else "yellow", "open files", found, cure)
    return _finding("green", "open files", found)


def locked_memory(limit_bytes: int | None = None, devices: Path = RDMA) -> Finding:
    """Only RDMA pins memory, so without a device the limit doesn't matter."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    found = "no limit" if limit == resource.RLIM_INFINITY else size(limit)
    if not _names(devices):
        return _finding("green", "locked memory", f"{found}; only RDMA needs it, and there is no device")
    if limit != resource.RLIM_INFINITY and limit < LOCKED_LOW_BYTES:
        cure = "ulimit -l unlimited, LimitMEMLOCK=infinity in the service's unit, or docker run --ulimit memlock=-1"
        return _finding("red", "locked memory", f"{found}: too little for RDMA, which pins landing memory", cure)
    return _finding("green", "locked memory", found)


def memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """What this process may still use, by its control group and by the machine."""
    left, by = _available_bytes(meminfo), "the machine"
    for limit_file, used_file in CGROUPS:
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and used is not None and limit - used < left:
            left, by = limit - used, f"the control group's limit of {size(limit)}"
    found = f"{size(left)} left by {by}"
    if left < MEMORY_FEW_BYTES:
        level = "red" if left < MEMORY_LOW_BYTES else "yellow"
        cure = "raise the limit or end what uses it; a worker's landing memory is slots × slot_bytes, 64 MiB by default"
        return Finding(level, AREA, "memory", found, cure)  # type: ignore[arg-type]  # one of two levels
    return _finding("green", "memory", found)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """kvferry's own landing memory has no file there; engines' queues, PyTorch and UCX's `posix` have."""
    cure = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        return _finding("yellow", "shared memory", f"{folder}: {error.strerror}", f"engines need it: {cure}")
    found = f"{folder}: {size(free)} free of {size(total)}"
    if free < SHARED_LOW_BYTES:
        text = f"{found}: full; engines' queues, PyTorch and NIXL on one host fail or end by a bus error"
        return _finding("red", "shared memory", text, f"remove what ended processes left in {folder}; {cure}")
    if free < SHARED_FEW_BYTES:
        return _finding("yellow", "shared memory", found, f"engines may want more: {cure}")
    return _finding("green", "shared memory", found)


def ptrace_scope(transport: str = "auto", file: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> Finding:
    """Where it isn't 0, process_vm can't be used between workers; shm can."""
    scope = _number(file)
    if not scope:
        return _finding("green", "ptrace scope", "not restricted" if scope is None else "0, not restricted")
    found = f"{scope}: process_vm works between relatives only" if scope == 1 else f"{scope}: process_vm needs root"
    if transport == "process_vm":
        cure = "sysctl kernel.yama.ptrace_scope=0, or give the workers CAP_SYS_PTRACE, or use the transport shm"
        return _finding("red", "ptrace scope", found, cure)
    return _finding("green", "ptrace scope", f"{found}; shm is used on one host and needs nothing")


def cores(count: int | None = None, file: Path = Path("/proc/sys/kernel/sched_autogroup_enabled")) -> Finding:
    """Linux may schedule each session's processes as one: where busy servers share few cores, requests then stall."""
    count = len(os.sched_getaffinity(0)) if count is None else count
    found = f"{count} for this process"
    if count <= FEW_CORES and _number(file):
        found += "; autogroup is on: start busy servers from one session, or they make each other wait"
    return _finding("green", "cores", found)


def rdma_devices(devices: Path = RDMA, verbs: Path = Path("/dev/infiniband")) -> list[Finding]:
    names = _names(devices)
    if not names:
        return [_finding("green", "rdma devices", "none; between hosts tcp is used")]
    if not _names(verbs):
        problem = f"{', '.join(names)}, but {verbs} is empty here, so no program can open them"
        return [_finding("yellow", "rdma devices", problem, "docker run --device=/dev/infiniband")]
    return [_port_state(devices / name) for name in names]


def own_access(host: str | None, keys: Keys | None) -> Finding:
    """The address that this machine's workers would bind, and whether they have keys."""
    try:
        at = access(host, keys)
    except DocumentError as error:
        return _finding("red", "address", str(error), f"set {HOST_VARIABLE} to an IPv4 address of this machine")
    except KVFerryError as error:
        return _finding("red", "keys", str(error), "see docs/security.md; `kvferry keys DIR` makes a folder of keys")
    if at.keys is None:
        return _finding("green", "address and keys", f"{at.host}, without keys: only this machine's processes are met")
    count = len(at.keys.allowed)
    return _finding("green", "address and keys", f"{at.host}, keys of {at.keys.name!r}, {count} allowed")


def _port_state(device: Path) -> Finding:
    states = {port.name: _text(port / "state").partition(": ")[2] for port in sorted((device / "ports").glob("*"))}
    text = ", ".join(f"port {port} {state or 'unknown'}" for port, state in states.items()) or "no port"
    if "ACTIVE" not in states.values():
        cure = "check cable, switch and subnet manager; ibstat shows why"
        return _finding("yellow", f"rdma {device.name}", f"{text}: none is active", cure)
    return _finding("green", f"rdma {device.name}", text)


def _finding(level: str, name: str, found: str, cure: str = "") -> Finding:
    return Finding(level, AREA, name, found, cure)  # type: ignore[arg-type]  # a level


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    """None where there is no number: no such file, or `max`."""
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _available_bytes(meminfo: Path) -> int:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize
