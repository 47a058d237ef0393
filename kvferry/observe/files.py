"""Logs of failed transfers as files: one per failure, the newest of each worker are kept."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from kvferry.observe.records import Log, encode_log

VARIABLE = "KVFERRY_TRACE"
SUFFIX = ".jsonl"
KEEP = 32
"""Files of one worker; older ones are removed."""


class Files:
    """Of one worker, in a folder that all workers may share. Used by one thread."""

    def __init__(self, folder: Path, instance: str, rank: int, keep: int = KEEP) -> None:
        safe = "".join(c if (c.isalnum() and c.isascii()) or c in "-_" else "_" for c in instance[:100])
        self._folder, self._prefix, self._keep = folder, f"{safe}.{rank}.", keep
        self._numbers = itertools.count()

    def write(self, log: Log) -> Path:
        """OSError where it can't be written."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{self._prefix}{time.time_ns():020d}-{os.getpid()}-{next(self._numbers)}{SUFFIX}"
        path, unfinished = self._folder / name, self._folder / f"{name}.unfinished"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode_log(log))
        unfinished.rename(path)
        for old in sorted(self._folder.glob(f"{self._prefix}*{SUFFIX}"))[: -self._keep]:
            old.unlink(missing_ok=True)
        return path
