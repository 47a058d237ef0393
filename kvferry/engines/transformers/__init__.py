"""Hugging Face Transformers as an engine: a paged KV cache, and instances that hand requests to each other.

Needs the `demo` extra (torch, transformers); importing this package does not load them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.engines.transformers.cache import PagedCache, PagePool
    from kvferry.engines.transformers.instance import Decoded, Prefilled, TransformersInstance
    from kvferry.engines.transformers.model import fetch_model, plain_tokens

_HOMES = {
    "Decoded": "instance",
    "PagePool": "cache",
    "PagedCache": "cache",
    "Prefilled": "instance",
    "TransformersInstance": "instance",
    "fetch_model": "model",
    "plain_tokens": "model",
}

__all__ = ["Decoded", "PagePool", "PagedCache", "Prefilled", "TransformersInstance", "fetch_model", "plain_tokens"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvferry.engines.transformers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
