"""SGLang as an engine: `--disaggregation-transfer-backend kvferry`.

SGLang finds `load` by its entry point `sglang.srt.plugins` and calls it in each of its processes. Importing this
package loads neither SGLang nor torch.
"""

from __future__ import annotations

NAME = "kvferry"
"""The name of the transfer backend on SGLang's command line."""

__all__ = ["NAME", "load"]


def load() -> None:
    """Add the backend to this SGLang process."""
    from kvferry.engines.sglang.plugin import install

    install()
