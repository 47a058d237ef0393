"""The failure guide has every error, every kind and every reason of the session, and nothing that doesn't exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from kvferry import errors
from kvferry.session.messages import FailureKind
from tests.docs.blocks import REPOSITORY

GUIDE = (REPOSITORY / "docs/failures.md").read_text()
CODE = REPOSITORY / "kvferry"
CLASSES = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]
TOLD = ("fail", "abort", "failure", "refuse", "_lost", "TransferAborted", "TransferRefused", "TransferTimeout")
"""Calls whose texts users get to see, in an error or in the counts of refused messages."""
NORMAL = 12
"""Shorter texts are parts of others."""


def template(node: ast.expr) -> list[str]:
    """The texts that an expression can give, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return template(node.body) + template(node.orelse)
    if isinstance(node, (ast.BoolOp, ast.BinOp)):
        parts = node.values if isinstance(node, ast.BoolOp) else [node.left, node.right]
        return [text for part in parts for text in template(part)]
    return [text for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr) for text in template(part)]


def texts_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in TOLD:
                yield from (text for argument in node.args for text in template(argument))
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target).split(".")[-1] in ("problem", "detail") for target in targets):
                yield from template(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("_problem"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from template(inner.value)


def reasons() -> dict[str, str]:
    """Every reason that the session gives, by its longest fixed part, and the module."""
    found = {}
    for module in sorted((CODE / "session").glob("*.py")):
        for text in texts_of(ast.parse(module.read_text())):
            longest = max(re.split("[…;]", text), key=len).strip(" :,")
            if len(text) >= NORMAL and " " in longest and len(longest) >= NORMAL:
                found[longest] = module.name
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_is_in_the_guide(name: str) -> None:
    assert re.search(rf"^\| `{name}` \| .+ \|", GUIDE, re.M)


@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_every_kind_is_in_the_guide(kind: str) -> None:
    assert f"`{kind}`" in GUIDE


def test_every_reason_of_the_session_is_in_the_guide() -> None:
    found = reasons()
    assert len(found) > 50, "the texts are no longer where this test looks for them"
    missing = {text: module for text, module in found.items() if text not in GUIDE}
    assert missing == {}, "add these to docs/failures.md: what happened, what to do"


def test_every_message_in_the_guide_is_in_the_code() -> None:
    code = "\n".join(_joined(path) for path in sorted(CODE.rglob("*.py")))
    gone = []
    for row in re.findall(r"^\| (`[^|]*?`(?:, `[^|]*?`)*) \|", GUIDE, re.M):
        for message in re.findall(r"`([^`]+)`", row):
            for part in message.split("…"):
                if len(part.strip()) >= NORMAL // 2 and part.strip(" ;:,") not in code:
                    gone.append(message)
    assert gone == []


def _joined(path: Path) -> str:
    """The module's texts, each in one piece, however it is broken in lines."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return "\n".join([*names, *(text for node in nodes for text in template(node))])
