"""What a folder of model weights is called by both sides of a transfer."""

from __future__ import annotations

import hashlib
from pathlib import Path


def model_name(folder: Path) -> str:
    """A name that two sides share when they run the same weights: the folder's name and a digest of what is in it.

    Of each weights file the size and the last MiB are digested: enough to tell models apart, and it costs no second.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as weights:
            weights.seek(max(0, size - (1 << 20)))
            digest.update(f"{file.name} {size} ".encode() + weights.read())
    return f"{folder.name}@{digest.hexdigest()[:12]}"
