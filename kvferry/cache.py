"""Where what was made once is kept: converted models, measured costs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$KVFERRY_CACHE, else kvferry in the user's cache folder."""
    own = os.environ.get("KVFERRY_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
