"""Only kvferry.layout.address calculates with addresses; none is ever in a signed or float dtype (F1, F2, F4 to F6).

A reading of the package's source: raw address numbers are what `.u64` of Addresses and `.value` of an Address give, and
every name that is assigned from them. Handing them on is fine, calculating with them is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

PACKAGE = Path(kvferry.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "layout" / "address.py")
RAW = ("u64", "value")
WRAPPERS = (
    "int",
    "uint64",
    "Address",
    "sorted",
    "list",
    "tuple",
    "min",
    "max",
    "abs",
    "concatenate",
    "array",
    "asarray",
)
METHODS = ("ravel", "reshape", "astype", "copy", "view", "tolist", "item", "min", "max", "take")
NARROW = ("int64", "int32", "intp", "float64", "float32", "int_", "longlong", "int", "float")


class Reader(ast.NodeVisitor):
    """Finds calculations with raw addresses in one module."""

    def __init__(self) -> None:
        self.raw_names: set[str] = set()
        self.faults: list[tuple[int, str]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = set(self.raw_names)
        for child in ast.walk(node):
            if isinstance(child, ast.Assign) and self.is_raw(child.value):
                self.raw_names |= {name for target in child.targets for name in names(target)}
            elif isinstance(child, ast.AnnAssign) and child.value is not None and self.is_raw(child.value):
                self.raw_names |= set(names(child.target))
        self.generic_visit(node)
        self.raw_names = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def is_raw(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in RAW
        if isinstance(node, ast.Name):
            return node.id in self.raw_names
        if isinstance(node, ast.Subscript):
            return self.is_raw(node.value)
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(map(self.is_raw, node.elts))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self.is_raw(node.elt)
        if isinstance(node, ast.Starred):
            return self.is_raw(node.value)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and self.is_raw(node.func.value):
                return True
            return called(node) in WRAPPERS and (called(node) == "Address" or any(map(self.is_raw, node.args)))
        return False

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.op, ast.BitOr) and (self.is_raw(node.left) or self.is_raw(node.right)):
            self.faults.append((node.lineno, f"calculates with an address: {ast.unparse(node)}"))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.is_raw(node.target) or self.is_raw(node.value):
            self.faults.append((node.lineno, f"calculates with an address: {ast.unparse(node)}"))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        dtypes = [*node.args[:2], *(keyword.value for keyword in node.keywords if keyword.arg == "dtype")]
        of_raw = isinstance(node.func, ast.Attribute) and self.is_raw(node.func.value)
        kept = called(node) in (
            "astype",
            "view",
            "array",
            "asarray",
            "fromiter",
            "full",
            "frombuffer",
            "c_int64",
            "int64",
        )
        if kept and (of_raw or any(map(self.is_raw, node.args))):
            if called(node) in NARROW or any(dtype_name(dtype) in NARROW for dtype in dtypes):
                self.faults.append((node.lineno, f"holds an address in another dtype: {ast.unparse(node)}"))
        self.generic_visit(node)


def names(node: ast.expr) -> Iterator[str]:
    return (child.id for child in ast.walk(node) if isinstance(child, ast.Name))


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def dtype_name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def faults(source: str) -> list[tuple[int, str]]:
    reader = Reader()
    reader.visit(ast.parse(source))
    return reader.faults


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_f1_to_f6_no_other_module_calculates_with_addresses(path: Path) -> None:
    found = faults(path.read_text(encoding="utf-8"))
    assert not found, "\n".join(f"{path.relative_to(PACKAGE.parent)}:{line}: {fault}" for line, fault in found)


@pytest.mark.parametrize(
    "line",
    [
        "x = a.u64 + 1",
        "x = 1 + base.value",
        "start = int(a.u64[0]); x = start * 4",
        "raw = a.u64; raw += b",
        "raw = a.u64.ravel()[order]; gap = raw[1:] - raw[:-1]",
        "x = Address(5) + 4",
        "x = a.u64.astype(np.int64)",
        "x = a.u64.view('int64')",
        "x = np.array([p.value for p in many], dtype=np.int64)",
        "x = np.asarray(a.u64, np.float64)",
        "x = np.int64(base.value)",
    ],
)
def test_the_reading_finds_a_fault(line: str) -> None:
    assert faults(f"def f(a, b, base, order, many):\n    {line}")


@pytest.mark.parametrize(
    "line",
    [
        "x = a.plus(4).u64",
        "order = np.argsort(a.u64, kind='stable'); n = order + 1",
        "iov = np.array([[base.value, n]], dtype=np.uint64)",
        "room = end.distance_from(base) + 4",
        "x = base.value < other.value",
    ],
)
def test_the_reading_lets_pass_what_is_fine(line: str) -> None:
    assert not faults(f"def f(a, base, end, other, n):\n    {line}")
