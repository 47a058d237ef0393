"""The Pythons that kvferry supports, as far as they can be had here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def find(version: str) -> Path | None:
    """An interpreter of that version: on PATH, or one that pyenv has."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    candidates = ([Path(on_path)] if on_path else []) + sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    return next((candidate for candidate in candidates if _is(candidate, version)), None)


def _is(candidate: Path, version: str) -> bool:
    """A command of that name may exist and say that this version is not chosen."""
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([candidate, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode == 0 and done.stdout.strip() == version
