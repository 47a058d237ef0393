"""Adding the backend to a process of SGLang (seen working with 0.5.23), before it reads its command line."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.disaggregation import utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvferry.engines.sglang import NAME

_UTILS = "sglang.srt.disaggregation.utils"
_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


def install() -> None:
    """The backend's name on the command line, its classes, and the pool, which KVArgs alone doesn't carry."""
    choices.add_disagg_transfer_backend_choices([NAME])
    add_member(utils.TransferBackend, NAME)
    HookRegistry.register(f"{_UTILS}.get_kv_class", choose_class, HookType.AROUND)
    HookRegistry.register(f"{_UTILS}.setup_state_kv_args", keep_pool, HookType.AFTER)
    HookRegistry.register(f"{_QUEUE}._send_kv_metadata", tell_prompt, HookType.BEFORE)


def add_member(kind: type[Enum], value: str) -> None:
    """Let `kind(value)` answer: SGLang keeps its backends in an enumeration that can't be extended by its own means."""
    if value in kind._value2member_map_:
        return
    member = object.__new__(kind)
    member._name_, member._value_ = value.upper(), value
    kind._member_map_[member._name_] = member
    kind._value2member_map_[value] = member


def choose_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """SGLang asks for the classes of a backend here."""
    if transfer_backend.value != NAME:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base import KVArgs

    from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
    from kvferry.engines.sglang.manager import KVFerryManager
    from kvferry.engines.sglang.receiver import KVFerryReceiver
    from kvferry.engines.sglang.sender import KVFerrySender

    kinds = utils.KVClassType
    return {
        kinds.KVARGS: KVArgs,
        kinds.MANAGER: KVFerryManager,
        kinds.SENDER: KVFerrySender,
        kinds.RECEIVER: KVFerryReceiver,
        kinds.BOOTSTRAP_SERVER: KVFerryBootstrapServer,
    }[class_type]


def keep_pool(_: None, kv_args: Any, token_to_kv_pool: Any, *args: Any, **options: Any) -> None:
    """SGLang completes KVArgs here: put the pool beside its pointers, so that nothing has to be guessed from lists."""
    kv_args.kvferry_pool = token_to_kv_pool


def tell_prompt(queue: Any, decode_req: Any, kv_indices: Any, *args: Any, **options: Any) -> None:
    """Decode's queue hands a receiver whole pages: say how many tokens they hold, which pages of another size need."""
    from sglang.srt.disaggregation.base.conn import KVTransferDestination

    from kvferry.engines.sglang.receiver import KVFerryReceiver, Prompt

    if isinstance(decode_req.kv_receiver, KVFerryReceiver):
        on_device = options.get("destination") != KVTransferDestination.HOST
        # pages on the host are filled up with tokens that don't exist
        tokens = len(kv_indices) + options["decode_prefix_len"] if on_device else len(decode_req.req.origin_input_ids)
        decode_req.kv_receiver.prompt = Prompt(tokens, queue.scheduler.sliding_window_size)
