"""SGLang asks for single functions here and copes without those it does not find."""

import absent

__version__ = "0.4.10"


def __getattr__(name: str) -> object:
    if name.endswith("_cpu"):
        return absent.Absent(f"{__name__}.{name}")
    raise AttributeError(name)
