"""`kvferry demo`: prompts are prefilled by one instance, decoded by another, and the tokens compared with a plain run.

Each instance is a set of worker processes. Answers go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.cli.progress import Progress

if TYPE_CHECKING:
    from kvferry.engines.transformers import TransformersInstance
    from kvferry.engines.transformers.messages import Moved

PROMPTS = (
    "What is the capital of France?",
    "Write one short sentence about the sea.",
    "Which is larger, seven or nine? Explain briefly.",
)
EXIT_DIFFERENT = 1
LAYOUTS = ("nhd", "hnd")
TRANSPORTS = ("auto", "shm", "process_vm", "tcp", "nixl")


class Moving(msgspec.Struct, frozen=True):
    """What moved for one prompt. `copies`: runs gathered on the prefill side and scattered on the decode side."""

    bytes: int
    copies: int
    seconds: float
    transports: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True):
    """One prompt. `first_difference` is the index of the first token that differs from the plain run, or None."""

    prompt: str
    answer: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    plain_tokens: tuple[int, ...]
    equal: bool
    first_difference: int | None
    moved: Moving


class Instances(msgspec.Struct, frozen=True):
    tp: int
    page_tokens: int
    layout: str


class Summary(msgspec.Struct, frozen=True):
    format: str
    model: str
    dtype: str
    prefill: Instances
    decode: Instances
    transport: str
    prompts: tuple[Outcome, ...]
    equal: int
    total: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this instead; repeat for more than one")
    for side, tp in (("prefill", 1), ("decode", 3)):
        parser.add_argument(
            f"--{side}-tp", type=_positive, default=tp, metavar="N", help=f"worker processes (default {tp})"
        )
        parser.add_argument(
            f"--{side}-page-tokens", type=_positive, default=16, metavar="N", help="tokens per page (default 16)"
        )
        parser.add_argument(f"--{side}-layout", choices=LAYOUTS, default="nhd", help="layout of a page (default nhd)")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="how bytes travel (default: the fastest that works)"
    )
    parser.add_argument("--max-tokens", type=_positive, default=48, metavar="N", help="longest answer (default 48)")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder with a Transformers model, or a .gguf file (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be ≥ 1, got {number}")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 if any token differs from the plain run."""
    # the model's module, and nothing heavier, until the extra is known to be there
    from kvferry.engines.transformers.model import need_extra

    need_extra()
    with Progress(sys.stderr) as progress:
        summary = run_demo(args, progress)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    else:
        print(_text(summary))
    return 0 if summary.equal == summary.total else EXIT_DIFFERENT


def run_demo(args: argparse.Namespace, progress: Progress) -> Summary:
    started = time.monotonic()
    progress.say("loading the tokeniser")
    from kvferry.engines.transformers.model import check_parallel, fetch_model
    from kvferry.engines.weights import model_name

    folder = fetch_model(args.model, lambda: progress.say("converting the model, only this first time: about 20 s"))
    for tp in (args.prefill_tp, args.decode_tp):
        check_parallel(folder, tp)
    prompts = list(args.prompt or PROMPTS)
    progress.total = 2 * len(prompts) * args.max_tokens
    from kvferry.session import RegistryServer

    with ExitStack() as stack:
        tokenizer, prompt_ids = _tokenise(folder, prompts)
        registry = stack.enter_context(RegistryServer())
        longest = max(len(ids) for ids in prompt_ids) + args.max_tokens
        progress.say(f"starting {args.prefill_tp} prefill and {args.decode_tp} decode workers")
        prefill, decode = (
            stack.enter_context(_instance(args, side, folder, registry.url, longest)) for side in ("prefill", "decode")
        )
        plain = _plain_runs(folder, prompt_ids, args.max_tokens, progress)
        progress.say("waiting for the workers")
        prefill.ready()
        decode.ready()
        outcomes = []
        for index, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
            progress.say(f"prompt {index + 1} of {len(prompts)}: prefill, transfer, decode")
            tokens, moved = _ask(prefill, decode, f"prompt-{index}", ids, args.max_tokens, progress.advance)
            outcomes.append(_outcome(prompt, ids, tokens, plain[index], moved, tokenizer))
            progress.reach((len(prompts) + index + 1) * args.max_tokens)
    return Summary(
        format="kvferry-demo/1",
        model=model_name(folder),
        dtype="float32",
        prefill=Instances(args.prefill_tp, args.prefill_page_tokens, args.prefill_layout),
        decode=Instances(args.decode_tp, args.decode_page_tokens, args.decode_layout),
        transport=args.transport,
        prompts=tuple(outcomes),
        equal=sum(outcome.equal for outcome in outcomes),
        total=len(outcomes),
        seconds=round(time.monotonic() - started, 3),
    )


def _tokenise(folder: Path, prompts: Sequence[str]) -> tuple[Any, list[list[int]]]:
    """Token ids of each prompt, in the model's chat template where it has one."""
    from transformers import AutoTokenizer

    from kvferry.engines.transformers.model import quiet

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = []
    for prompt in prompts:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
        else:
            ids.append(list(tokenizer(prompt)["input_ids"]))
    return tokenizer, ids


def _instance(args: argparse.Namespace, side: str, folder: Path, registry: str, longest: int) -> TransformersInstance:
    from kvferry.engines.transformers import TransformersInstance

    page_tokens = getattr(args, f"{side}_page_tokens")
    return TransformersInstance(
        folder,
        name=side,
        registry=registry,
        tp=getattr(args, f"{side}_tp"),
        page_tokens=page_tokens,
        layout=getattr(args, f"{side}_layout"),
        pages=2 * -(-longest // page_tokens) + 4,  # twice what one request needs, so that its pages are scattered
        transport=args.transport,
    )


def _plain_runs(folder: Path, prompts: Sequence[list[int]], max_tokens: int, progress: Progress) -> list[list[int]]:
    """The reference: the whole model in this one process, with Transformers' own cache."""
    import torch

    from kvferry.engines.transformers.model import load_model, plain_tokens

    torch.set_num_threads(1)  # as in the workers: other thread counts may round differently
    model = load_model(folder)
    answers = []
    for index, ids in enumerate(prompts):
        progress.say(f"plain run {index + 1} of {len(prompts)}, to compare with")
        answers.append(plain_tokens(model, ids, max_tokens, progress.advance))
        progress.reach((index + 1) * max_tokens)
    return answers


def _ask(
    prefill: TransformersInstance,
    decode: TransformersInstance,
    request: str,
    prompt: list[int],
    max_tokens: int,
    each: Callable[[], None],
) -> tuple[tuple[int, ...], Moving]:
    prefilled = prefill.prefill(request, prompt)
    decoded = decode.decode(prefilled, max_tokens, each)
    return decoded.tokens, _moving(prefill.release(prefilled), decoded.moved)


def _moving(sources: Sequence[Moved], targets: Sequence[Moved]) -> Moving:
    return Moving(
        bytes=sum(moved.bytes for moved in targets),
        copies=sum(moved.copies for moved in (*sources, *targets)),
        seconds=max(moved.seconds for moved in targets),
        transports=tuple(sorted({name for moved in sources for name in moved.transports})),
    )


def _outcome(
    prompt: str, ids: list[int], tokens: Sequence[int], plain: Sequence[int], moved: Moving, tokenizer: Any
) -> Outcome:
    equal = list(tokens) == list(plain)
    shorter = min(len(tokens), len(plain))
    difference = next((i for i in range(shorter) if tokens[i] != plain[i]), shorter)
    return Outcome(
        prompt=prompt,
        answer=tokenizer.decode(list(tokens), skip_special_tokens=True).strip(),
        prompt_tokens=len(ids),
        tokens=tuple(tokens),
        plain_tokens=tuple(plain),
        equal=equal,
        first_difference=None if equal else difference,
        moved=moved,
    )


def _text(summary: Summary) -> str:
    lines = []
    for outcome in summary.prompts:
        moved = outcome.moved
        verdict = (
            f"all {len(outcome.tokens)} tokens equal the plain run"
            if outcome.equal
            else f"DIFFERS from the plain run at token {outcome.first_difference}"
        )
        lines += [
            f"> {outcome.prompt}",
            *(f"  {line}" for line in outcome.answer.splitlines()),
            f"  [{verdict}; {moved.bytes:,} bytes in {moved.copies:,} copies, {moved.seconds:.3f} s "
            f"over {', '.join(moved.transports)}]",
            "",
        ]
    sides = " → ".join(
        f"{name} TP{side.tp}, {side.layout} pages of {side.page_tokens} tokens"
        for name, side in (("prefill", summary.prefill), ("decode", summary.decode))
    )
    what = f"{summary.dtype}, transport {summary.transport}"
    lines.append(f"tokens equal: {summary.equal}/{summary.total}  ({sides}; {what}; {summary.seconds:.1f} s)")
    return "\n".join(lines)
