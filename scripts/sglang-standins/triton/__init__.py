"""Triton's decorators are used at import: they take a kernel and give something that raises when it is launched."""

import sys

import absent

sys.modules["triton.knobs"] = None  # an ImportError, with which SGLang and PyTorch cope
absent.stand_in(__name__)
__version__ = "0.0.0"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def jit(kernel=None, **_):
    """`@jit` and `@jit(...)`."""
    if kernel is None:
        return jit
    return absent.Absent(kernel.__qualname__)


def autotune(*_, **__):
    return lambda kernel: kernel


heuristics = autotune


class Config:
    """PyTorch subclasses it."""

    def __init__(self, *args, **options):
        self.args, self.options = args, options
